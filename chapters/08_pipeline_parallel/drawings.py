"""Drawings of a pipeline: what crosses a border of two stages, how chunks lie on ranks, and the two products of a linear layer's backward
pass. The notebook shows them; nothing is computed here."""

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from shared.course import figures

RANK_COLORS = (figures.TRAINING, figures.COMMUNICATION, figures.COMPUTE, figures.WRONG)


def stages() -> None:
    """Eight blocks on four ranks, with the two tensors that cross each border."""
    _, axes = plt.subplots(figsize=(8.0, 1.9))
    for rank in range(4):
        names = ["embedding"] * (rank == 0) + [f"blocks {2 * rank}, {2 * rank + 1}"] + ["norm, head"] * (rank == 3)
        axes.add_patch(Rectangle((3 * rank, 0), 2, 1.2, facecolor="white", edgecolor=RANK_COLORS[rank], linewidth=2))
        axes.text(3 * rank + 1, 0.6, "\n".join(names), ha="center", va="center", fontsize=9)
        axes.text(3 * rank + 1, 1.35, f"rank {rank}", ha="center", fontsize=9, color=RANK_COLORS[rank])
        if rank < 3:
            for y, ends, text, place in ((0.85, (2, 3), "hidden\nstates", 0.95), (0.35, (3, 2), "gradient", 0.02)):
                start, stop = (3 * rank + end for end in ends)
                axes.add_patch(FancyArrowPatch((start, y), (stop, y), arrowstyle="->", mutation_scale=12, color=figures.REFERENCE))
                axes.text(3 * rank + 2.5, place, text, ha="center", fontsize=7.5)
    axes.set(xlim=(-0.2, 11.2), ylim=(-0.1, 1.7))
    axes.axis("off")
    plt.show()


def chunks_on_ranks(blocks: int = 16, ranks: int = 4) -> None:
    """The blocks of a model on its ranks, with one chunk and with two on each."""
    _, columns = plt.subplots(1, 2, figsize=(8.0, 1.5))
    for axes, chunks in zip(columns, (1, 2), strict=True):
        number = ranks * chunks
        for block in range(blocks):
            stage = block * number // blocks
            axes.add_patch(Rectangle((block, 0), 1, 1, facecolor=RANK_COLORS[stage % ranks], edgecolor="white"))
            axes.text(block + 0.5, 0.5, f"{block}", ha="center", va="center", fontsize=8, color="white")
        for stage in range(number):
            name = f"rank {stage % ranks}" + (f"\nchunk {stage // ranks}" if chunks > 1 else "")
            axes.text((stage + 0.5) * blocks / number, -0.45, name, ha="center", va="center", fontsize=7)
        axes.set(xlim=(0, blocks), ylim=(-0.9, 1), title=f"{blocks} blocks, {chunks} chunk{'s' * (chunks > 1)} on each rank")
        axes.axis("off")
    plt.show()


def two_products() -> None:
    """The graph of a linear layer, with the two products of its backward pass."""
    _, axes = plt.subplots(figsize=(8.0, 2.0))
    boxes = {"x": (0, 0.9), "x W^T": (4, 0.9), "y": (8, 0.9), "W": (4, 0.0)}
    for name, (x, y) in boxes.items():
        axes.add_patch(Rectangle((x, y), 1.4, 0.5, facecolor="white", edgecolor=figures.REFERENCE))
        axes.text(x + 0.7, y + 0.25, name, ha="center", va="center", fontsize=9)
    light, dark = figures.PASSES["I"], figures.PASSES["W"]
    for start, stop, color, text, place in (
        ((1.4, 1.25), (4.0, 1.25), figures.REFERENCE, "forward", (2.7, 1.32)),
        ((5.4, 1.25), (8.0, 1.25), figures.REFERENCE, "forward", (6.7, 1.32)),
        ((8.0, 1.05), (5.4, 1.05), figures.REFERENCE, "dL/dy", (6.7, 0.78)),
        ((4.0, 1.05), (1.4, 1.05), light, "I: dL/dy W, for the previous stage", (2.7, 0.72)),
        ((4.7, 0.9), (4.7, 0.5), dark, "W: (dL/dy)^T x, for this rank's optimizer", (5.0, 0.62)),
    ):
        axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="->", mutation_scale=13, color=color, linewidth=2))
        axes.text(*place, text, ha="left" if text.startswith("W:") else "center", fontsize=8, color=color)
    axes.set(xlim=(-0.2, 9.8), ylim=(-0.1, 1.6))
    axes.axis("off")
    plt.show()
