"""Measure every layout on both backends against one process, and print the table of chapter 06's page: float64, over all features.

python tests/parity/layout_table.py            two ranks, then four
python tests/parity/layout_table.py 2          two ranks
"""

import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1], Path(__file__).parent)]

from layouts import EXACT, FOUR, TWO, cases_of, matrix, references  # noqa: E402

from shared.parallel.launch import run_processes  # noqa: E402

QUANTITIES = ("loss", "norm", "gradients", "weights")


def table(asked: list[int]) -> str:
    """The largest relative difference of any tensor, on any rank."""
    lines = ["| layout | backend | loss | gradient norm | every gradient | weights after three steps |", "|---|---|---|---|---|---|"]
    expected = references(EXACT)
    for ranks, layouts in ((2, TWO), (4, FOUR)):
        results = run_processes(matrix, ranks, cases_of(layouts, EXACT), expected, timeout=900) if ranks in asked else []
        for layout in layouts["course"] if results else ():
            for backend in (backend for backend, names in layouts.items() if layout in names):
                found = [of_rank[backend, layout, feature] for of_rank in results for feature in EXACT]
                worst = (f"{max(each[name] for each in found):.0e}" for name in QUANTITIES)
                lines.append(f"| {layout} | {backend} | {' | '.join(worst)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([int(word) for word in sys.argv[1:]] or [2, 4]))
