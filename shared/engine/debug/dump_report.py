"""Chapter 04. Reading dumps: a table, statistics by layer, magnitudes as a map, and what changed between two steps.

Left out on purpose: collecting (`shared.engine.debug.dump`).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from shared.course import figures
from shared.course.errors import CourseError
from shared.engine.debug.dump import KINDS, Dump, Entry
from shared.engine.debug.magnitudes import HIGHEST, LOWEST, moved_share

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


def dump_table(dump: Dump, kind: str) -> Table:
    """A row for each tensor; what is not finite stands out."""
    table = Table(title=f"{kind}, step {dump.step}", title_justify="left")
    table.add_column("name", overflow="fold")
    for column in ("shape", "mean", "std", "rms", "largest", "zeros", "not finite"):
        table.add_column(column, justify="right")
    for name, entry in entries_of(dump, kind).items():
        told = entry.statistics
        numbers = [f"{told[key]:.2e}" for key in ("mean", "std", "rms", "abs_max")]
        numbers += [f"{told[key]:.1%}" for key in ("zeros", "not_finite")]
        table.add_row(name, "x".join(map(str, entry.shape)), *numbers, style="bold red" if told["not_finite"] else None)
    return table


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
    axes.set(xlabel="layer", ylabel=f"{statistic} of the {kind}", title=f"step {dump.step}")
    if statistic in ("rms", "std", "abs_max"):
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small")


def plot_magnitudes(axes: Any, dump: Dump, kind: str) -> None:
    """A row for each tensor, a column for each power of two, the darker the fewer elements; the outer columns hold all beyond."""
    named = entries_of(dump, kind)
    counts = np.array([entry.histogram for entry in named.values()], dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, aspect="auto", cmap=figures.SEQUENCE, extent=(LOWEST - 1, HIGHEST + 1, len(named), 0), interpolation="nearest")
    axes.set(xlabel="magnitude (power of two)", title=f"{kind}, step {dump.step}: share of the elements")
    axes.set_yticks(np.arange(len(named)) + 0.5, labels=list(named), fontsize="x-small")
    axes.grid(False)


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


def diff_table(changes: list[Change], rows: int = 10) -> Table:
    """The first `rows` changes."""
    table = Table(title="what changed most", title_justify="left")
    table.add_column("kind")
    table.add_column("name", overflow="fold")
    for column in ("rms before", "rms after", "factor", "moved", "newly not finite"):
        table.add_column(column, justify="right")
    for change in changes[:rows]:
        sizes = f"{change.before:.2e}", f"{change.after:.2e}", f"{change.factor:.3g}"
        shares = f"{change.moved:.0%}", f"{change.newly_not_finite:.1%}"
        table.add_row(change.kind, change.name, *sizes, *shares, style="bold red" if change.newly_not_finite > 0 else None)
    return table
