"""Drawings of mixtures of experts: who holds which experts, and an all-to-all before and after. The notebook shows them; nothing is
computed here."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from shared.course import figures

RANK_COLORS = (figures.TRAINING, figures.COMMUNICATION, figures.COMPUTE, figures.WRONG)
EXPERT_COLORS = figures.sequence_colors(8)


def ranks(axes: Axes, experts_of: Sequence[Sequence[int]]) -> None:
    """Four ranks with what each of them holds. experts_of: of each rank, the numbers of its experts."""
    for rank, numbers in enumerate(experts_of):
        axes.add_patch(Rectangle((3 * rank, 0), 2.2, 2.2, facecolor="white", edgecolor=RANK_COLORS[rank], linewidth=2))
        axes.text(3 * rank + 1.1, 2.3, f"rank {rank}: its own texts", ha="center", fontsize=9, color=RANK_COLORS[rank])
        axes.text(3 * rank + 1.1, 1.72, "embedding, attention,\nnorms, router, head", ha="center", va="center", fontsize=7.5)
        for place, expert in enumerate(numbers):
            axes.add_patch(Rectangle((3 * rank + 0.15 + 0.49 * place, 0.3), 0.43, 0.8, facecolor=EXPERT_COLORS[expert]))
            color = "white" if expert < 6 else "black"
            axes.text(3 * rank + 0.365 + 0.49 * place, 0.7, f"{expert}", ha="center", va="center", fontsize=9, color=color)
    for left in (0, 6):
        ends = (left + 2.2, 0.7), (left + 3.0, 0.7)
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="<->", mutation_scale=14, color=figures.COMMUNICATION, linewidth=2))
        axes.text(left + 2.6, 0.85, "tokens'\nrows", ha="center", fontsize=7.5, color=figures.COMMUNICATION)
    axes.axis("off")


def data_and_experts(experts_of: Sequence[Sequence[int]], added: Sequence[Sequence[int]] = ()) -> None:
    """The ranks, and dashed lines between those over which the gradients of the same experts are added."""
    _, axes = plt.subplots(figsize=(8.0, 3.0 if added else 2.2))
    ranks(axes, experts_of)
    for depth, group in enumerate(added):
        ends = [3 * rank + 1.1 for rank in group]
        low = -0.25 - 0.3 * depth
        axes.plot([ends[0], ends[0], ends[-1], ends[-1]], [0, low, low, 0], color=figures.REFERENCE, linestyle="--")
    if added:
        axes.text(5.6, -0.95, "dashed: the gradients of these experts are added", ha="center", fontsize=8)
    axes.set(xlim=(-0.2, 11.4), ylim=(-1.1 if added else -0.1, 2.6))
    plt.show()


def all_to_all(sent: Sequence[Sequence[Sequence[int]]], received: Sequence[Sequence[Sequence[int]]]) -> None:
    """Rows before and after an all-to-all, in the colour of the rank that sent them: [rank][other rank] -> numbers of rows."""
    _, columns = plt.subplots(1, 2, figsize=(8.0, 0.5 * len(sent) + 0.7), sharey=True)
    for axes, parts, title in ((columns[0], sent, "before, by receiver"), (columns[1], received, "after, by sender")):
        for rank, by_other in enumerate(parts):
            left = 0.0
            for other, rows in enumerate(by_other):
                color = RANK_COLORS[rank if axes is columns[0] else other]
                axes.text(left + max(len(rows), 0.5) / 2, -rank + 0.72, f"{other}", ha="center", va="bottom", fontsize=7)
                for row in rows:
                    axes.add_patch(Rectangle((left + 0.05, -rank), 0.9, 0.65, facecolor=color))
                    axes.text(left + 0.5, -rank + 0.32, f"{row}", ha="center", va="center", fontsize=8, color="white")
                    left += 1.0
                left += 0.4 if rows else 0.9
            axes.text(-0.3, -rank + 0.32, f"rank {rank}", ha="right", va="center", fontsize=8, color=RANK_COLORS[rank])
        axes.set(xlim=(-1.3, 5.2), ylim=(0.9 - len(sent), 1.2), title=title)
        axes.axis("off")
    plt.show()
