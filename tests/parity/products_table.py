"""Measure every product of layouts on 1, 2, 4 and 8 ranks against one process, in float64, and write the tables of chapter 09's PARITY.md.

python tests/parity/products_table.py --write                  all of it, half an hour on two CPU cores
python tests/parity/products_table.py --kept results.json      what that file holds is not measured again; it is written as cells end
python tests/parity/products_table.py course dense 2 4         only these backends, models and numbers of ranks; printed
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "moe", "parity")]

import torch  # noqa: E402
from products import MODELS, RECOMPUTED, Cell, by_processes, cells, layouts, measured, refusal  # noqa: E402

RANKS = (1, 2, 4, 8)
TOGETHER = 12  # cells that the same processes run: each leaves its groups behind


def measure(asked: list[Cell], known: dict[str, float], note=lambda: None) -> None:
    """Add the largest difference of each cell to `known`."""
    waiting: list[Cell] = []
    for cell in asked:
        if str(cell) in known or refusal(cell):
            continue
        if cell.backend == "course" or cell.ranks == 1:
            known[str(cell)] = measured(cell)
            note()
        else:
            waiting.append(cell)
    for ranks in RANKS:
        of_size = [cell for cell in waiting if cell.ranks == ranks]
        for first in range(0, len(of_size), TOGETHER):
            part = of_size[first : first + TOGETHER]
            known.update(zip(map(str, part), by_processes(part), strict=True))
            note()
