"""Reading dumps of activations, gradients and weights: statistics by layer, plotted, and the difference of two steps.

Left out on purpose: collecting (`shared.engine.debug.dump`).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from shared.course import figures
from shared.course.errors import CourseError
from shared.engine.debug.dump import KINDS, Dump, Entry

LAYER = re.compile(r"^(.*\bblocks\.)(\d+)\b\.?(.*)$")


def entries_of(dump: Dump, kind: str) -> dict[str, Entry]:
    """
    Raises:
        CourseError: no such kind, or none of it in this dump.
    """
    if not dump.entries.get(kind):
        there = ", ".join(name for name in KINDS if dump.entries.get(name))
        raise CourseError(f"The dump of step {dump.step} holds no {kind!r}: choose {there}.")
    return dump.entries[kind]


def by_layer(dump: Dump, kind: str, statistic: str = "rms") -> dict[str, list[tuple[int, float]]]:
    """Part of a block -> (layer, value) in order; the block itself is the part "block".

    >>> by_layer(dump, "activations")["attention.o_proj"]
    [(0, 0.021), (1, 0.034)]
    """
    parts: dict[str, list[tuple[int, float]]] = {}
    for name, entry in entries_of(dump, kind).items():
        if match := LAYER.match(name):
            parts.setdefault(match[3] or "block", []).append((int(match[2]), entry.statistics[statistic]))
    return {part: sorted(values) for part, values in parts.items()}


def plot_by_layer(axes: Any, dump: Dump, kind: str, statistic: str = "rms", parts: list[str] | None = None) -> None:
    """One line for each part of a block over the layers.

    Args:
        axes: matplotlib's.
        parts: which of `by_layer`'s; None for all.

    Raises:
        CourseError: a part that the dump does not have.
    """
    found = by_layer(dump, kind, statistic)
    parts = parts or list(found)
    if unknown := [part for part in parts if part not in found]:
        raise CourseError(f"The blocks have no part {unknown[0]!r}: choose {', '.join(found)}.")
    for part, color in zip(parts, figures.sequence_colors(len(parts)), strict=True):
        axes.plot(*zip(*found[part], strict=True), marker="o", color=color, label=part)
    title = f"step {dump.step}" + f", the parts of {dump.part_of}" * bool(dump.part_of)
    axes.set(xlabel="layer", ylabel=f"{statistic} of the {kind}", title=title)
    if statistic in ("rms", "std", "abs_max"):
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small")


@dataclass(frozen=True)
class Change:
    """One tensor in two dumps.

    factor: root mean square after divided by that before. moved: share of the elements that changed their power of two.
    newly_not_finite: by how much the share of inf and NaN grew.
    """

    kind: str
    name: str
    before: float
    after: float
    factor: float
    moved: float
    newly_not_finite: float


def diff_dumps(before: Dump, after: Dump) -> list[Change]:
    """The tensors that both have, what changed most first: newly not finite, then by the factor, up or down alike.

    Raises:
        CourseError: the dumps have no tensor in common.
    """
    changes = [
        change_of(kind, name, entry, after.entries[kind][name])
        for kind, named in before.entries.items()
        for name, entry in named.items()
        if name in after.entries.get(kind, {})
    ]
    if not changes:
        raise CourseError(f"The dumps of steps {before.step} and {after.step} have no tensor in common: they are of different models.")
    return sorted(changes, key=lambda change: (-change.newly_not_finite, -distance(change.factor), -change.moved))


def change_of(kind: str, name: str, before: Entry, after: Entry) -> Change:
    old, new = before.statistics, after.statistics
    factor = new["rms"] / old["rms"] if old["rms"] else (1.0 if new["rms"] == 0 else math.inf)
    moved = moved_share(before.histogram, after.histogram)
    return Change(kind, name, old["rms"], new["rms"], factor, moved, new["not_finite"] - old["not_finite"])


def distance(factor: float) -> float:
    """How far from 1, counted in doublings; NaN is as far as can be."""
    return abs(math.log2(factor)) if factor > 0 and math.isfinite(factor) else math.inf


def moved_share(before: list[int], after: list[int]) -> float:
    """The share of elements that would have to change bins to make one histogram the other: 0 to 1 (total variation distance)."""
    totals = sum(before) or 1, sum(after) or 1
    return sum(abs(a / totals[0] - b / totals[1]) for a, b in zip(before, after, strict=True)) / 2
