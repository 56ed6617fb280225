"""Chapter 12. The HTML report of a run: one file that holds its own plots, to be opened, kept or sent."""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from matplotlib.figure import Figure

from shared.course import figures as style
from shared.data.completion import Gap
from shared.output_files import write_atomically
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig

Series = list[tuple[int, float]]


@dataclass
class Results:
    """All that the report shows. metrics: step -> name -> value, as the run logged them."""

    metrics: dict[int, dict[str, float]]
    summary: dict[str, Any]
    samples: list[tuple[str, str]]  # prompt, what the model went on with
    completions: list[Gap]
    report: Path


def write_report(config: TrainerConfig, results: Results) -> None:
    """Write the HTML file and, beside it in `figures`, each figure as a PNG."""
    folder = config.engine.output / "figures"
    pictures = {}
    for name, figure in drawn(results).items():
        content = png(figure)
        write_atomically(folder / f"{name}.png", content)
        pictures[name] = base64.b64encode(content).decode()
    template = Environment(autoescape=True).from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.render(
        title=config.engine.output.name,
        summary=[(name, format_value(name, value)) for name, value in results.summary.items()],
        pictures=pictures,
        samples=results.samples,
        completions=results.completions,
        code=code_of(config.engine.output),
        config=yaml.safe_dump(provenance.plain(config), sort_keys=False),
    )
    write_atomically(results.report, page.encode())


def code_of(output: Path) -> dict[str, Any]:
    """The code's version as the run's folder has it."""
    try:
        return dict(json.loads((output / provenance.CODE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no reason to end a finished run without its report
        return {"version": f"unknown: {output / provenance.CODE} is damaged"}


def format_value(name: str, value: Any) -> str:
    """A value of the summary as a person reads it."""
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if "difference" in name:  # first, because the rest of its name is a folder's
        return f"{value:.1e}"
    if "right" in name or "utilisation" in name:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def drawn(results: Results) -> dict[str, Figure]:
    """The report's figures by name. One of which nothing was logged is left out."""
    found = {
        "loss": curves(results, {"train/loss": "training", "validation/loss": "held-out files"}, "loss (nats per token)"),
        "bits_per_byte": curves(results, {"validation/bits_per_byte": "held-out files"}, "bits per byte"),
        "throughput": curves(results, {"speed/tokens_per_second": "tokens per second"}, "tokens per second", zero=True),
        "utilisation": curves(results, {"speed/mfu": "model FLOPs utilisation"}, "share of the peak", zero=True),
        "norms": curves(results, {"norm/gradient": "gradient"}, "gradient norm", zero=True),
        "learning_rate": curves(results, learning_rates(results), "learning rate", zero=True),
        "expert_load": expert_load(results),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def learning_rates(results: Results) -> dict[str, str]:
    names = sorted({name for row in results.metrics.values() for name in row if name.startswith("learning_rate")})
    return {name: name.removeprefix("learning_rate/") for name in names}


def series(results: Results, name: str) -> Series:
    return [(step, row[name]) for step, row in sorted(results.metrics.items()) if row.get(name) is not None]


def curves(results: Results, names: dict[str, str], label: str, zero: bool = False) -> Figure | None:
    """Figures of the log against the step, each with its name."""
    present = {title: points for name, title in names.items() if (points := series(results, name))}
    if not present:
        return None
    style.use_style()
    figure = Figure()
    axes = figure.subplots()
    colours = {"training": style.TRAINING, "held-out files": style.HELD_OUT}
    for title, points in present.items():
        marker = "o" if len(points) < 40 else None
        axes.plot(*zip(*points, strict=True), label=title, marker=marker, markersize=3, color=colours.get(title))
    axes.set(xlabel="training step", ylabel=label)
    if zero:
        axes.set_ylim(bottom=0)
    if len(present) > 1:
        axes.legend()
    return figure


def expert_load(results: Results) -> Figure | None:
    """The load of each expert over time as a heat map, with the blocks one above the other (`shared.moe.balancing`)."""
    name = "experts/load/"
    keys = {key for row in results.metrics.values() for key in row if key.startswith(name)}
    experts = sorted(tuple(map(int, key[len(name) :].split("."))) for key in keys)
    if not experts:
        return None
    rows = [dict(series(results, f"{name}{block}.{expert}")) for block, expert in experts]
    steps = sorted(rows[0])
    style.use_style()
    figure = Figure(figsize=(7.0, 1.2 + 0.14 * len(rows)))
    axes = figure.subplots()
    drawn = axes.imshow([[row[step] for step in steps] for row in rows], aspect="auto", vmin=0, vmax=2, interpolation="nearest")
    marked = range(0, len(steps), max(1, len(steps) // 8))
    firsts = [place for place, (_, expert) in enumerate(experts) if expert == 0]
    axes.set_xticks(marked, [steps[place] for place in marked])
    axes.set_yticks(firsts, [f"block {experts[place][0]}" for place in firsts])
    axes.set(xlabel="training step", ylabel="expert")
    axes.grid(False)
    figure.colorbar(drawn, label="load (1 is equal)")
    return figure


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
