"""Chapter 12. HTML pages of reports and the plots in them: one file that holds its own figures, to be opened, kept or sent."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.course import figures as style
from shared.output_files import write_atomically
from shared.trainer import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = list[tuple[float, float]]
HELD_OUT = "held-out files"
COLOURS = {"training": style.TRAINING, HELD_OUT: style.HELD_OUT}


def series(metrics: Mapping[int, Mapping[str, float]], name: str, against: str | None = None) -> Series:
    """Points of a logged metric: against the step, or another metric."""
    rows = [(row.get(against) if against else step, row.get(name)) for step, row in sorted(metrics.items())]
    return [(x, y) for x, y in rows if x is not None and y is not None]


def plot(lines: Mapping[str, Series], ylabel: str, xlabel: str = "training step", **line: Any) -> "Figure":
    """Plot lines in one figure, with a legend if there are several. line: matplotlib's settings of a line."""
    figure = style.new_figure()
    axes = figure.subplots()
    for title, points in lines.items():
        how = {"marker": "o" if len(points) < 40 else None, "markersize": 3, "color": COLOURS.get(title)} | line
        axes.plot(*zip(*points, strict=True), label=title.replace("$", r"\$"), **how)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if len(lines) > 1:
        axes.legend()
    return figure


def embedded(figures: Mapping[str, "Figure"], folder: Path | None = None) -> dict[str, str]:
    """Figures as base64 PNGs, to be embedded in a page. folder: where they are written as files too."""
    pictures = {}
    for name, figure in figures.items():
        content = style.png(figure)
        if folder is not None:
            write_atomically(folder / f"{name}.png", content)
        pictures[name] = base64.b64encode(content).decode()
    return pictures


def page(template: Path, **values: Any) -> bytes:
    """An HTML page whose body is a Jinja template, with the head and the style of all reports. Every value is escaped."""
    from jinja2 import Environment  # after the last step, for which no first one should wait
    from markupsafe import Markup

    head, css = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("head.html", "report.css"))
    text = f"{head}{template.read_text(encoding='utf-8')}</body>\n</html>\n"
    return Environment(autoescape=True).from_string(text).render(style=Markup(css), **values).encode()


def code_of(output: Path) -> dict[str, Any]:
    """The version of the code, from the run's folder."""
    found, _ = provenance.read_object(output / provenance.CODE)
    return found or {"version": f"unknown: {output / provenance.CODE} is damaged"}
