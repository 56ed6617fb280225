"""Chapter 12. The HTML report of a run: one file that holds its own plots, to be opened, kept or sent."""

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shared.course import figures as style
from shared.output_files import write_atomically
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.reports.figures import Results, drawn
from shared.trainer.reports.listing import format_value

if TYPE_CHECKING:
    pass


def write_report(config: TrainerConfig, results: Results) -> None:
    """Write the HTML file and, beside it in `figures`, each figure as a PNG."""
    folder = config.engine.output / "figures"
    pictures = {}
    for name, figure in drawn(results).items():
        content = style.png(figure)
        write_atomically(folder / f"{name}.png", content)
        pictures[name] = base64.b64encode(content).decode()
    page = rendered(
        Path(__file__).with_name("report.html"),
        title=config.engine.output.name,
        summary=[(name, format_value(name, value)) for name, value in results.judged.summary.items()],
        pictures=pictures,
        judged=results.judged,
        eras=results.eras,
        changes=results.changes,
        code=code_of(config.engine.output),
        config=yaml.safe_dump(provenance.plain(config), sort_keys=False),
    )
    write_atomically(results.report, page)


def rendered(template: Path, **values: Any) -> bytes:
    """An HTML page from a Jinja template, in the style of all reports. Every value is escaped."""
    from jinja2 import Environment  # after the last step, for which no first one should wait
    from markupsafe import Markup

    style = Markup(Path(__file__).with_name("report.css").read_text(encoding="utf-8"))
    return Environment(autoescape=True).from_string(template.read_text(encoding="utf-8")).render(style=style, **values).encode()


def code_of(output: Path) -> dict[str, Any]:
    """The code's version as the run's folder has it."""
    try:
        return dict(json.loads((output / provenance.CODE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no reason to end a finished run without its report
        return {"version": f"unknown: {output / provenance.CODE} is damaged"}
