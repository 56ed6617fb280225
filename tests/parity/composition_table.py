"""Measure how far stand-ins for the axes of chapters 07 to 09 are from one process, around every data engine, and print the table of
chapter 06's page: float64, three steps, ranks as threads.

python tests/parity/composition_table.py            AdamW, or Muon
python tests/parity/composition_table.py sgd        SGD, which amplifies no rounding
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "parallel")]

import torch  # noqa: E402
from layout_runs import largest_difference  # noqa: E402
from test_composition import CASES, CONFIG, OPTIMIZERS, PRODUCTS, expected, name_of, observed, run  # noqa: E402


def worst(found: list[dict], one: dict) -> dict[str, float]:
    """The largest relative difference of any rank."""
    differences = {}
    for what in ("loss", "norm"):
        differences[what] = max(((torch.stack(each[what]) / torch.stack(one[what])) - 1).abs().max().item() for each in found)
    differences["roles"] = max(abs(norm / one["roles"][role] - 1).item() for each in found for role, norm in each["roles"].items())
    for what in ("gradients", "weights"):
        differences[what] = max(largest_difference(each[what], {name: one[what][name] for name in each[what]}) for each in found)
    return differences


def table(optimizer: str | None) -> str:
    lines = ["| layout | optimizer | loss | gradient norm | norms by role | every gradient | weights after three steps |", "|" + "---|" * 7]
    for case in [*CASES, *((layout, CONFIG, "ep" in layout) for layout in PRODUCTS)]:
        rule = optimizer or ("muon" if "tp2" in case[0] or case[2] else "adamw")
        found = worst(run(case, observed, optimizer=OPTIMIZERS[rule]), expected(*case[1:], rule))
        lines.append(f"| {name_of(case)} | {rule} | {' | '.join(f'{value:.0e}' for value in found.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1] if len(sys.argv) > 1 else None))
