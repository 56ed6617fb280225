"""Floor 0. Plot style: every figure has the same size and, in all chapters, one meaning for each colour. And drawings of several
chapters: a pipeline's timeline, the load of experts.

The colours are Okabe and Ito's, which stay apart for colour-blind readers (Okabe & Ito 2008, "Color Universal Design").
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = "#0072B2"  # what the model is trained on
HELD_OUT = "#D55E00"  # text that it never saw
REFERENCE = "#555555"  # a line to compare with
WRONG = "#CC79A7"  # something that fails on purpose
COMPUTE = "#009E73"
COMMUNICATION = "#E69F00"
IDLE = "#BBBBBB"
MEMORY = "#56B4E9"
PASSES = {"F": "#DDF2EB", "B": COMPUTE, "I": COMPUTE, "W": "#00503A"}  # of a pipeline: computing, from light to dark
SEQUENCE = "viridis"  # an ordered family of lines, or a map of amounts

STYLE = {
    "figure.figsize": (7.0, 3.4),
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "image.cmap": SEQUENCE,
}


def use_style() -> None:
    """Draw all following figures in the course's style."""
    import matplotlib

    matplotlib.rcParams.update(STYLE)


def new_figure(**settings: Any) -> "Figure":
    """An empty figure in the course's style. matplotlib is imported when the first is drawn: a program that draws none starts sooner."""
    from matplotlib.figure import Figure

    use_style()
    return Figure(**settings)


def png(figure: "Figure") -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def sequence_colors(number: int) -> list[tuple[float, float, float, float]]:
    """`number` colours from dark to light for lines that have an order, such as rising temperatures."""
    import matplotlib

    return [matplotlib.colormaps[SEQUENCE](0.9 * i / max(number - 1, 1)) for i in range(number)]


def draw_pipeline(axes: Any, rows: Sequence[Sequence[Any]], unit: str = "forward passes of one micro-batch", width: float = 6.5) -> None:
    """Draw a pipeline's timeline (Gantt chart): a row for each rank, a block for each action, grey where the rank waits.

    A block holds the kind of its action and the number of its micro-batch, as far as there is room, and a black bar at its bottom for
    each chunk of the rank before this one.

    Args:
        axes: matplotlib's.
        rows: for each rank its spans (`shared.parallel.pipeline.simulate.Span`): action, begin, end.
        unit: of the time.
        width: of the axes in inches, which decides whether there is room for a block's letters.
    """
    from matplotlib.patches import Rectangle

    ends = max(row[-1].end for row in rows)
    for rank, row in enumerate(rows):
        axes.add_patch(Rectangle((0, rank - 0.4), ends, 0.8, color=IDLE, linewidth=0))
        for (kind, microbatch, chunk), begin, end in row:
            axes.add_patch(Rectangle((begin, rank - 0.4), end - begin, 0.8, facecolor=PASSES[kind], edgecolor="white", linewidth=0.8))
            for bar in range(chunk):
                axes.add_patch(Rectangle((begin, rank + 0.3 - 0.16 * bar), end - begin, 0.1, color="black", linewidth=0))
            inches = (end - begin) / ends * width
            text = f"{kind}{microbatch}" if inches > 0.2 else f"{microbatch}" if inches > 0.09 else ""
            color = "black" if kind == "F" else "white"
            axes.text((begin + end) / 2, rank - 0.05 * bool(chunk), text, ha="center", va="center", fontsize=7, color=color)
    axes.set(xlim=(0, ends), ylim=(len(rows) - 0.5, -0.5), xlabel=f"time, in {unit}", yticks=range(len(rows)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(rows))])
    axes.grid(visible=False)


def draw_load(axes: Any, shares: Any, most: float = 4.0) -> Any:
    """Draw the load of experts over time as a heat map: a row for each expert, a column for each step.

    Args:
        axes: matplotlib's.
        shares: [steps, E], each expert's load as a multiple of an equal load (1 is balanced).
        most: the load from which on the colour no longer changes.

    Returns:
        What `figure.colorbar` takes.
    """
    drawn = axes.imshow(shares.T, aspect="auto", vmin=0, vmax=most, interpolation="nearest")
    axes.set(xlabel="training step", ylabel="expert", yticks=range(shares.shape[1]))
    axes.grid(visible=False)
    return drawn
