"""Drawings of tensor parallelism: a layer cut over two ranks, f and g in both directions, the block under sequence parallelism, keys on a
ring. The notebook shows them; nothing is computed here."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from shared.course import figures
from shared.parallel.context.zigzag import own_chunks

RANK_COLORS = (figures.TRAINING, figures.MEMORY, figures.COMPUTE, figures.WRONG)


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], color: str = figures.REFERENCE, text: str = "") -> None:
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="->", mutation_scale=10, color=color))
    axes.text((start[0] + stop[0]) / 2, max(start[1], stop[1]) + 0.1, text, ha="center", fontsize=7.5, color=color)


def sliced(axes: Axes, left: float, bottom: float, size: tuple[float, float], rank: int, by_columns: bool) -> None:
    """A matrix on two ranks, with the slice of one of them filled."""
    width, height = size
    axes.add_patch(Rectangle((left, bottom), width, height, fill=False, edgecolor=figures.REFERENCE))
    corner = (left + rank * width / 2, bottom) if by_columns else (left, bottom + (1 - rank) * height / 2)
    axes.add_patch(Rectangle(corner, *((width / 2, height) if by_columns else (width, height / 2)), color=RANK_COLORS[rank]))


def feed_forward() -> None:
    """A feed-forward layer on two ranks, with f and g where its ranks meet."""
    _, axes = plt.subplots(figsize=(8.0, 4.0))
    for rank, bottom in ((0, 2.2), (1, 0.4)):
        axes.text(-0.4, bottom + 0.5, f"rank {rank}", fontsize=9, color=RANK_COLORS[rank], ha="right")
        for x, name in ((0.0, "x, whole"), (10.4, "y, whole")):
            axes.add_patch(Rectangle((x, bottom + 0.1), 0.5, 0.8, color=figures.IDLE))
            axes.text(x + 0.25, bottom - 0.15, name, ha="center", fontsize=8)
        for left, low, size, by_columns, name in (
            (2.6, bottom, (1.8, 1.0), True, "A: columns"),
            (6.4, bottom - 0.1, (1.0, 1.3), False, "B: rows"),
        ):
            sliced(axes, left, low, size, rank, by_columns)
            axes.text(left + size[0] / 2, low + size[1] + 0.12, name, ha="center", fontsize=8)
        for start, stop, text in ((0.6, 2.5, ""), (4.5, 6.3, "act(its features)"), (7.5, 10.3, "")):
            arrow(axes, (start, bottom + 0.5), (stop, bottom + 0.5), text=text)
    for x, name in ((1.5, "f"), (8.9, "g")):
        axes.add_patch(Rectangle((x - 0.25, 0.2), 0.5, 3.2, color=figures.COMMUNICATION, alpha=0.35))
        axes.text(x, 3.5, name, ha="center", fontsize=13)
    axes.set(xlim=(-1.6, 11.6), ylim=(0.0, 4.0))
    axes.axis("off")
    plt.show()


def directions() -> None:
    """f and g in the forward and in the backward pass: which of the two sums."""
    _, columns = plt.subplots(1, 2, figsize=(8.0, 2.0))
    for axes, title, summing in zip(columns, ("forward", "backward"), ("g", "f"), strict=True):
        for y, rank in ((1.2, 0), (0.4, 1)):
            axes.text(-0.3, y, f"rank {rank}", fontsize=8, color=RANK_COLORS[rank], ha="right", va="center")
            axes.add_patch(Rectangle((3.1, y - 0.22), 1.8, 0.44, color=RANK_COLORS[rank]))
            axes.text(4.0, y, "A, act, B", ha="center", va="center", fontsize=8, color="white")
            for start, stop in ((0.0, 1.2), (1.9, 3.0), (5.0, 6.1), (6.8, 8.0)):
                ends = (start, y), (stop, y)
                arrow(axes, *(ends if title == "forward" else ends[::-1]))
        for x, name in ((1.55, "f"), (6.45, "g")):
            full = name == summing
            axes.add_patch(
                Rectangle((x - 0.3, 0.05), 0.6, 1.5, facecolor=figures.COMMUNICATION if full else "white", edgecolor=figures.COMMUNICATION)
            )
            axes.text(x, 1.7, f"{name}: {'sum' if full else 'nothing'}", ha="center", fontsize=8)
        axes.set(xlim=(-1.7, 8.2), ylim=(-0.1, 2.0), title=title)
        axes.axis("off")
    plt.show()


def sequence_parallel_block() -> None:
    """A sublayer under sequence parallelism: what rank 0 of two holds at each point, and what stands between."""
    _, axes = plt.subplots(figsize=(8.0, 2.2))
    parts = (
        ("stream", "rows"),
        ("norm", "rows"),
        ("its input", "whole"),
        ("heads or\nfeatures", "columns"),
        ("summand", "partial"),
        ("sum", "rows"),
        ("stream", "rows"),
    )
    for place, (name, held) in enumerate(parts):
        left = 1.5 * place
        axes.add_patch(Rectangle((left, 0), 0.8, 1.0, fill=False, edgecolor=figures.REFERENCE))
        filled = {"rows": (0.8, 0.5, 0.5), "columns": (0.4, 1.0, 0.0)}.get(held, (0.8, 1.0, 0.0))
        axes.add_patch(
            Rectangle((left, filled[2]), *filled[:2], facecolor=RANK_COLORS[0], alpha=0.35 if held == "partial" else 1.0, edgecolor="none")
        )
        axes.text(left + 0.4, -0.12, name, ha="center", va="top", fontsize=8)
        if place < len(parts) - 1:
            arrow(axes, (left + 0.85, 0.5), (left + 1.45, 0.5))
    for place, forward, backward in ((1, "all-gather", "reduce-scatter"), (4, "reduce-scatter", "all-gather")):
        x = 1.5 * place + 1.15
        axes.add_patch(Rectangle((x - 0.12, -0.05), 0.24, 1.15, color=figures.COMMUNICATION, alpha=0.5))
        axes.text(x, 1.45, f"{forward} →", ha="center", fontsize=8)
        axes.text(x, 1.2, f"← {backward}", ha="center", fontsize=8)
    axes.set(xlim=(-0.2, 10.0), ylim=(-0.6, 1.7))
    axes.axis("off")
    plt.show()


def ring(reach: Sequence[int]) -> None:
    """Which chunk of keys a rank has at each hop around the ring. reach: of each chunk, how many hops it makes."""
    ranks = len(reach) // 2
    _, axes = plt.subplots(figsize=(8.0, 0.55 * ranks + 0.5))
    for rank in range(ranks):
        axes.text(-0.15, -rank + 0.35, f"rank {rank}", ha="right", va="center", fontsize=9, color=RANK_COLORS[rank])
    for owner in range(ranks):
        for chunk, step in zip(own_chunks(owner, ranks), (1, -1), strict=True):
            for hop in range(reach[chunk] + 1):
                rank = (owner + step * hop) % ranks
                corner = (2.4 * hop + (0.0 if step == 1 else 1.0), -rank)
                axes.add_patch(Rectangle(corner, 0.9, 0.7, color=RANK_COLORS[owner]))
                axes.text(corner[0] + 0.45, corner[1] + 0.35, f"{chunk}", ha="center", va="center", fontsize=8, color="white")
    for hop in range(max(reach) + 1):
        name = "own keys" if hop == 0 else f"after hop {hop}"
        axes.text(2.4 * hop + 0.95, 0.95, name, ha="center", fontsize=8)
    axes.set(xlim=(-0.9, 2.4 * max(reach) + 2.0), ylim=(1 - ranks - 0.1, 1.3))
    axes.axis("off")
    plt.show()
