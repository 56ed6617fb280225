"""Measure every layout on both backends against one process, and print the tables of chapter 06's page: float64, over all features.

python tests/parity/layout_table.py            two ranks, then four
python tests/parity/layout_table.py 2          two ranks
python tests/parity/layout_table.py bfloat16   in bfloat16 instead; float16 in that
"""

import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support", Path(__file__).parent)]

from layouts import EXACT, FOUR, TWO, Difference, cases_of, matrix, references, rounding  # noqa: E402

from shared.parallel.comm.launch import run_processes  # noqa: E402

QUANTITIES = ("loss", "norm", "gradients", "weights")


def table(asked: list[int], features: list[str]) -> str:
    """The largest relative difference of any tensor, on any rank."""
    lines = ["| layout | backend | loss | gradient norm | every gradient | weights after three steps |", "|---|---|---|---|---|---|"]
    expected = references(features)
    if features[0] not in EXACT:
        lines.append(line("one process, to itself in float32", "", rounding(features[0])))
    for ranks, layouts in ((2, TWO), (4, FOUR)):
        results = run_processes(matrix, ranks, cases_of(layouts, features), expected, timeout=900) if ranks in asked else []
        for layout in layouts["course"] if results else ():
            for backend in (backend for backend, names in layouts.items() if layout in names):
                found = [of_rank[backend, layout, feature] for of_rank in results for feature in features]
                lines.append(line(layout, backend, {name: max(each[name] for each in found) for name in QUANTITIES}))
    return "\n".join(lines)


def line(layout: str, backend: str, worst: Difference) -> str:
    return f"| {layout} | {backend} | {' | '.join(f'{worst[name]:.0e}' for name in QUANTITIES)} |"


if __name__ == "__main__":
    ranks, others = ([word for word in sys.argv[1:] if word.isdigit() == digits] for digits in (True, False))
    print(table([int(word) for word in ranks] or [2, 4], others or EXACT))
