"""Measure every product of layouts on 1, 2, 4 and 8 ranks against one process, in float64, and print chapter 09's PARITY.md.

python tests/parity/products_table.py --write                 all of it: more than an hour on two CPU cores
python tests/parity/products_table.py --kept FILE [--write]   what that file holds is not measured again; results are added to it
python tests/parity/products_table.py --kept FILE --known     only with the products that it holds
python tests/parity/products_table.py --covering              another covering set, for tests/parity/test_09_products.py
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("..", "support", "moe", "parity")]

import torch  # noqa: E402
from planted import RULES, caught, last_losses  # noqa: E402
from product_checkpoints import LAYOUTS, resume, write  # noqa: E402
from products import IN_16_BITS, LIMIT, MODELS, PRECISIONS, RANKS, RECOMPUTED, Cell, by_processes, cells, covering  # noqa: E402
from products import in_16_bits, layouts, line_of, measured, refusal  # noqa: E402

from shared.course.paths import CHECKOUT  # noqa: E402

PAGE = CHECKOUT / "chapters" / "09_mixture_of_experts" / "PARITY.md"
TOGETHER = 18  # cells that the same processes run: each leaves its groups behind
COLUMNS = [(model, recompute, "course") for model in MODELS for recompute in RECOMPUTED]


class Kept:
    """Results by name, in a file that grows as they come."""

    def __init__(self, file: Path | None):
        self.file = file
        self.results: dict = json.loads(file.read_text()) if file and file.exists() else {}

    def get(self, name: str, make: Callable):
        if name not in self.results:
            self.put(name, make())
        return self.results[name]

    def put(self, name: str, result) -> None:
        self.results[name] = result
        if self.file:
            self.file.write_text(json.dumps(self.results, indent=0))


def measure(kept: Kept, known: bool) -> dict[Cell, float | None]:
    """The largest difference of every cell that is not refused: on threads, and PyTorch's in processes over gloo. known: None for a cell
    whose difference is not kept."""
    asked = [cell for ranks in RANKS for cell in cells(ranks) if not refusal(cell)]
    if known:
        return {cell: kept.results.get(str(cell)) for cell in asked}
    for ranks in RANKS:
        waiting = [c for c in asked if c.ranks == ranks > 1 and c.backend == "torch" and str(c) not in kept.results]
        for first in range(0, len(waiting), TOGETHER):
            together = waiting[first : first + TOGETHER]
            for cell, value in zip(together, by_processes(together), strict=True):
                kept.put(str(cell), value)
    return {cell: kept.get(str(cell), lambda cell=cell: measured(cell)) for cell in asked}


def shown(values: list[float | None]) -> str:
    return "refused" if not values else "not measured" if None in values else f"{max(values):.0e}"


def products(found: dict[Cell, float | None]) -> Iterator[str]:
    every = [cell for ranks in RANKS for cell in cells(ranks)]
    values = [value for value in found.values() if value is not None]
    refused = Counter(re.sub(r"\b\d+\b", "N", refusal(cell)) for cell in every if cell not in found)
    assert max(values) < LIMIT, {str(cell): value for cell, value in found.items() if value and not value < LIMIT}
    yield (
        f"{len(every)} products of {sum(len(layouts(ranks)) for ranks in RANKS)} layouts: {len(values)} are equal to one process, the "
        f"farthest with {max(values):.0e}; {refused.total()} are refused."
    )
    if len(values) < len(found):
        yield f"{len(found) - len(values)} others, which nothing refuses, are not measured yet: `not measured` in the table."
    yield from ("", "| refused because | products |", "|---|---|")
    yield from (f"| {reason} | {count} |" for reason, count in refused.most_common())
    yield from ("", "| layout | " + " | ".join(f"{model}, {how}" for model, how, _ in COLUMNS) + " | torch, dense | torch, experts |")
    yield "|" + "---|" * (len(COLUMNS) + 3)
    for layout in (layout for ranks in RANKS for layout in layouts(ranks)):
        row = [[found[cell] for cell in [Cell(layout, *column)] if cell in found] for column in COLUMNS]
        row += [[found[c] for c in (Cell(layout, model, how, "torch") for how in RECOMPUTED) if c in found] for model in MODELS]
        if any(row):
            yield f"| {layout} | {' | '.join(map(shown, row))} |"


def checkpoints(kept: Kept) -> Iterator[str]:
    yield "| written by, read by | " + " | ".join(LAYOUTS) + " |"
    yield "|" + "---|" * (len(LAYOUTS) + 1)
    for writer in LAYOUTS:
        yield f"| {writer} | {' | '.join(f'{far:.0e}' for far in kept.get(f'checkpoints of {writer}', lambda w=writer: read_by_all(w)))} |"


def read_by_all(writer: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        write(writer, "muon", Path(folder))
        return [resume(reader, "muon", Path(folder)) for reader in LAYOUTS]


def planted(kept: Kept) -> Iterator[str]:
    yield "| rule | planted bug | caught first by | difference, step 1 | loss after 20 steps | of one process | of another seed |"
    yield "|" + "---|" * 7
    for rule, bug in RULES.items():
        far = kept.get(f"planted: {rule}", lambda bug=bug: [caught(bug, bug.caught_by), *last_losses(bug)])
        difference, one, with_bug, seed = far
        yield f"| {rule} | {bug.says} | {bug.caught_by} | {difference:.0e} | {with_bug:.3f} | {one:.3f} | {seed:.3f} |"


def in_precisions(kept: Kept) -> Iterator[str]:
    yield "| layout | " + " | ".join(f"{precision}: loss | norm | gradients" for precision in PRECISIONS) + " |"
    yield "|" + "---|" * (1 + 3 * len(PRECISIONS))
    for layout in ("float32", *IN_16_BITS):
        row = [kept.get(f"{layout} in {precision}", lambda p=precision: in_16_bits(layout, p)) for precision in PRECISIONS]  # noqa: B023
        name = "one process, to itself in float32" if layout == "float32" else layout
        yield f"| {name} | {' | '.join(f'{value:.0e}' for each in row for value in each.values())} |"


def page(kept: Kept, known: bool) -> str:
    parts = {"PRODUCTS": products(measure(kept, known)), "CHECKPOINTS": checkpoints(kept)}
    parts |= {"PRECISIONS": in_precisions(kept), "PLANTED": planted(kept)}
    return TEXT.format(**{name: "\n".join(lines) for name, lines in parts.items()})


TEXT = """\
# How far each product of layouts is from one process

`python tests/parity/products_table.py --write` enumerates every layout of 1, 2, 4 and 8 ranks (degrees of pp, dp, fsdp, cp and tp that
multiply to that, `sp` where tp, ZeRO where dp, ep where it divides dp x fsdp), for a dense model and for one with experts, with nothing,
whole blocks or all but products computed again, by the course's engines and by PyTorch's. The trainer's configuration either refuses a
product before anything runs, or the product trains for three steps in float64, and writes its largest relative difference to one process
into this page: of the loss, the gradient's norm, every gradient and every weight after the third step, on any rank, with AdamW and with
Muon (on eight ranks with AdamW where whole blocks are computed again, and else with Muon). Two micro-batches hold unequally many targets
in each row, and none in two of the rows. The model has grouped-query attention, norms of queries and keys and a tied embedding; with
experts it has DeepSeek-V3's router and bias, eight experts, a shared one, both losses, a dense first block and a capacity (none under
cp). Experts must be chosen by the same tokens, exactly.

The course's layouts run on threads, PyTorch's in processes over gloo. `tests/parity/test_09_products.py` requires 1e-9 of a covering set,
in which every three facts that are allowed together meet (axes, `sp`, ZeRO's stage, model, recomputation, optimizer), and that every
refusal is one of these:

{PRODUCTS}

A layout with no row is refused in every column. Differences come from sums in another order, which AdamW's division by the root of a small
second moment enlarges.

## Checkpoints from any layout to any other

With experts and Muon: two steps on the layout of the row, a checkpoint, and three more steps on that of the column, which began with other
weights. Each cell is the largest relative difference of any weight to a run of five steps in one process. The loader's position is saved
with the rest, and each step has other batches. `tests/parity/test_09_checkpoints.py` requires 1e-9 of a part of this, and that the export
to Hugging Face's format has the same bytes from each layout.

{CHECKPOINTS}

## In 16 bits

The first step with matrix products in bfloat16, or in float16 with a loss scale of 64, every token with all eight experts: a choice that
rounding turns is another model. Ranks round other sums than one process. In no layout do the norm and the gradients differ more from one
process in 16 bits than that process differs from itself in float32. The tests allow 1.5 times as much.

{PRECISIONS}

## Planted bugs

One bug for each rule by which layouts are equal to one process, and the first case of the covering set that catches it, with the
difference of loss, norm and gradients in the first step. Beside it the loss after 20 steps on two batches over and over: with the bug, in
one process, and in one process with other initial weights. The loss begins at about 3.4 and falls with every bug; with nine of the eleven
it ends at most 2% above one process, or below it. No curve by itself shows that something is wrong.

{PLANTED}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--covering", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.covering:
        print("\n".join(map(line_of, covering())))
    elif asked.write:
        PAGE.write_text(page(Kept(asked.kept), asked.known))
    else:
        print(page(Kept(asked.kept), asked.known))
