"""Floor 0. Plot style: every figure has the same size and, in all chapters, one meaning for each colour.

The colours are Okabe and Ito's, which stay apart for colour-blind readers (Okabe & Ito 2008, "Color Universal Design").
"""

TRAINING = "#0072B2"  # what the model is trained on
HELD_OUT = "#D55E00"  # text that it never saw
REFERENCE = "#555555"  # a line to compare with
WRONG = "#CC79A7"  # something that fails on purpose
COMPUTE = "#009E73"
COMMUNICATION = "#E69F00"
IDLE = "#BBBBBB"
MEMORY = "#56B4E9"
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


def sequence_colors(number: int) -> list[tuple[float, float, float, float]]:
    """`number` colours from dark to light for lines that have an order, such as rising temperatures."""
    import matplotlib

    return [matplotlib.colormaps[SEQUENCE](0.9 * i / max(number - 1, 1)) for i in range(number)]
