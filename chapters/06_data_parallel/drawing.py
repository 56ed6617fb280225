"""Drawn diagrams of chapter 06: a ring of ranks, and who holds what under DDP, ZeRO and FSDP."""

import math
from typing import TYPE_CHECKING

from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from shared.course import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELD = {
    "DDP": ("all", "all", "all"),
    "ZeRO-1": ("all", "all", "share"),
    "ZeRO-2": ("all", "share", "share"),
    "FSDP": ("share", "share", "share"),
}
KINDS = {"weights": figures.MEMORY, "gradients": figures.COMMUNICATION, "optimizer state": figures.TRAINING}


def ring_step(axes: "Axes", step: int, ranks: int = 4) -> None:
    """One step of the ring's first half: how many ranks' numbers are in each chunk, and which chunk each rank sends to the next."""
    axes.set(xlim=(-1.75, 1.75), ylim=(-1.6, 1.6), aspect="equal", title=f"after {step} of {ranks - 1} steps")
    axes.axis("off")
    places = [(1.1 * math.sin(2 * math.pi * rank / ranks), 1.1 * math.cos(2 * math.pi * rank / ranks)) for rank in range(ranks)]
    for rank, (x, y) in enumerate(places):
        for chunk in range(ranks):
            summed = min((rank - chunk) % ranks, step) + 1  # how many ranks' numbers are in this chunk by now
            color = figures.COMMUNICATION if summed == ranks else figures.IDLE
            left = x - 0.44 + 0.22 * chunk
            axes.add_patch(Rectangle((left, y - 0.16), 0.22, 0.32, facecolor=color, edgecolor="black", linewidth=0.7))
            axes.text(left + 0.11, y, str(summed), ha="center", va="center", fontsize=8)
        axes.text(x, y + 0.28, f"rank {rank}", ha="center", fontsize=8)
        if step < ranks - 1:
            (a, b), chunk = places[(rank + 1) % ranks], (rank - step) % ranks
            start, end = ((x * 0.62 + a * 0.38, y * 0.62 + b * 0.38), (x * 0.38 + a * 0.62, y * 0.38 + b * 0.62))
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=figures.COMPUTE))
            axes.text((x + a) * 0.34, (y + b) * 0.34, f"chunk {chunk}", ha="center", va="center", fontsize=8)


def who_holds_what(axes: "Axes", ranks: int = 4) -> None:
    """For each layout and rank three bars, weights, gradients and optimizer state: the filled part is what the rank holds."""
    for column, (name, held) in enumerate(HELD.items()):
        for rank in range(ranks):
            for row, (part, color) in enumerate(zip(held, KINDS.values(), strict=True)):
                left, bottom = column * (ranks + 1) + rank, -row
                axes.add_patch(Rectangle((left, bottom), 0.85, 0.8, facecolor="white", edgecolor=figures.IDLE, linewidth=0.7))
                height = 0.8 if part == "all" else 0.8 / ranks
                offset = 0.0 if part == "all" else 0.8 * (ranks - 1 - rank) / ranks
                axes.add_patch(Rectangle((left, bottom + offset), 0.85, height, facecolor=color))
            axes.text(column * (ranks + 1) + rank + 0.42, -2.35, str(rank), ha="center", fontsize=8)
        axes.text(column * (ranks + 1) + ranks / 2 - 0.08, 1.0, name, ha="center", fontsize=10)
    axes.set(xlim=(-0.3, 4 * (ranks + 1) - 0.8), ylim=(-2.8, 1.5))
    axes.text(-0.3, -2.75, "rank", fontsize=8)
    axes.axis("off")
    axes.legend(handles=[Patch(color=color, label=kind) for kind, color in KINDS.items()], fontsize=8, ncols=3, loc="lower right")
