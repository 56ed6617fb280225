"""Chapter 12. Report of a training pipeline: one page over all stages, with abilities by stage, curves, and answers side by side.

All of it is read from the stages' folders, so it can be written at any time.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from shared.course import figures as style
from shared.engine.checkpoint.folder import Checkpoints
from shared.output_files import write_atomically
from shared.rl.examination import Answer
from shared.trainer import provenance
from shared.trainer.costs import IN_ALL
from shared.trainer.mode import by_kind
from shared.trainer.pipeline.abilities import ALL, PREFERRING, TITLES, read_kept
from shared.trainer.pipeline.stages import RECORD, Pipeline, Stage
from shared.trainer.records.record import RESULTS
from shared.trainer.reports.page import code_of, embedded, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "report.html"
SHOWN = 2  # prompts of each kind, with the answers of all stages
CURVES = (  # of the figures that a run leaves
    "loss", "bits_per_byte", "ranked_right", "margins", "reward", "reward_parts", "zero_variance", "kl", "length", "pass_at_k",
    "throughput",
)  # fmt: skip
PLAIN = ("bits per byte", "mean reward")  # how rows begin that are no shares
BLANK = "(nothing but spaces)"
WON = "win rate over the previous stage"


class Row(NamedTuple):
    """A row of the table of abilities. values: of each stage's model; None where it was not measured."""

    name: str
    values: list[float | None]

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Each value as text, and whether it is better or worse than that of the previous stage, or an empty text."""
        found, before = [], None
        for value in self.values:
            if value is None:
                found.append(("–", ""))
                continue
            gain = 0.0 if before is None or self.name == WON else value - before
            gain = -gain if self.name == "bits per byte" else gain
            shown = f"{value:.3f}" if self.name.startswith(PLAIN) else f"{100 * value:.0f} %"
            found.append((shown, "better" if gain > 5e-4 else "worse" if gain < -5e-4 else ""))
            before = value
        return found

    @property
    def is_summary(self) -> bool:
        """Whether it stands for all kinds of prompts."""
        return self.name.startswith("bits") or ": " not in self.name or f": {ALL} " in self.name or "pass@" in self.name


class AbilityTable(NamedTuple):
    """What one stage is judged by, for the model of every stage."""

    name: str
    title: str
    rows: list[Row]


def ability_tables(pipeline: Pipeline) -> list[AbilityTable]:
    """The tables of abilities, in the order of the stages."""
    kept = [read_kept(stage.folder) for stage in pipeline.stages]
    found = []
    for stage in pipeline.stages:
        measured = [each.get(stage.name) for each in kept]
        names = dict.fromkeys(row for each in measured if each for row in each["values"])
        rows = [Row(row, [each["values"].get(row) if each else None for each in measured]) for row in names]
        if stage.config.mode in PREFERRING and rows:
            rows.append(Row(WON, win_rates(measured)))
        if rows:
            found.append(AbilityTable(stage.name, TITLES[stage.config.mode].format(stage.name), rows))
    return found


def win_rates(measured: list[dict[str, Any] | None]) -> list[float | None]:
    """The share of prompts whose answer scores higher than that of the previous stage; ties count half."""
    found, before = [], None
    for each in measured:
        scores = each and [answer["score"] for answer in each["answers"]]
        is_pair = scores and before
        found.append(fmean(0.5 + 0.5 * ((new > old) - (new < old)) for old, new in zip(before, scores, strict=True)) if is_pair else None)
        before = scores or before
    return found


def write_report(pipeline: Pipeline) -> Path:
    """Write the page, and the plots of abilities beside it."""
    tables, names = ability_tables(pipeline), [stage.name for stage in pipeline.stages]
    figures = embedded({table.name: drawn(table, names) for table in tables}, pipeline.output / "figures")
    summaries = [summary_of(stage) for stage in pipeline.stages]
    content = page(
        Path(__file__).with_name("report.html"),
        title=pipeline.output.name,
        stages=[stage_entry(stage, summary, pipeline.output) for stage, summary in zip(pipeline.stages, summaries, strict=True)],
        minutes=sum(map(minutes_of, summaries)),
        names=names,
        abilities=tables,
        pictures={table.title: figures[table.name] for table in tables},
        answers=list(side_by_side(pipeline)),
        code=code_of(pipeline.stages[0].folder),
        words="\n".join(f"{stage.name}: {stage.file.name} {' '.join(stage.words)}" for stage in pipeline.stages),
    )
    write_atomically(pipeline.output / FILE, content)
    return pipeline.output / FILE


def summary_of(stage: Stage) -> dict[str, Any]:
    """The summary of a stage's run; empty before its end."""
    summary = provenance.read_object(stage.folder / RESULTS)[0].get("summary")
    return summary if isinstance(summary, dict) else {}


def minutes_of(summary: dict[str, Any]) -> float:
    """The minutes of a run. Training, evaluation and saving count in every start of it, all else in the last one only."""
    return sum(value for name, value in summary.items() if name.startswith("seconds ") and name != IN_ALL) / 60


def stage_entry(stage: Stage, summary: dict[str, Any], output: Path) -> dict[str, Any]:
    """A stage's line in the table of stages, and its curves."""
    steps = Checkpoints(stage.folder / "checkpoints").steps()
    state = "finished" if (stage.folder / RECORD).is_file() else f"stopped at step {steps[-1]}" if steps else "not begun"
    trained = summary.get("trained parameters", summary.get("parameters"))
    found = [stage.config.mode, state, f"{stage.config.steps:,}"]
    found += [f"{each:,}" if each else "–" for each in (summary.get("training tokens"), trained)]
    found += [f"{minutes_of(summary):.1f}", f"{summary['peak memory, GiB']:.2f}"] if summary else ["–", "–"]
    files = {name: stage.folder / "figures" / f"{name}.png" for name in CURVES}
    report = stage.folder / FILE
    return {
        "name": stage.name,
        "cells": found,
        "report": str(report.relative_to(output)) if report.is_file() else None,
        "pictures": {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items() if summary and file.is_file()},
    }


def side_by_side(pipeline: Pipeline) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield for each table of answers its title, and some prompts with the answer of every stage's model."""
    kept = {stage.name: read_kept(stage.folder) for stage in pipeline.stages}
    for stage in pipeline.stages:
        said = {name: [Answer(**answer) for answer in each[stage.name]["answers"]] for name, each in kept.items() if stage.name in each}
        answers = next(iter(said.values()), [])
        if not answers:
            continue
        judged = stage.config.mode in PREFERRING
        numbers = [answers.index(each) for kind, some in by_kind(answers).items() if kind != ALL for each in some[:SHOWN]]
        yield TITLES[stage.config.mode].format(stage.name), [
            {
                "prompt": answers[number].prompt,
                "wanted": answers[number].wanted,
                "said": [(name, each[number].text.strip() or BLANK, verdict_of(each[number].score, judged)) for name, each in said.items()],
            }
            for number in numbers
        ]


def verdict_of(score: float, judged: bool) -> str:
    """A score as text. judged: by the hidden preference."""
    return f"{score:.2f}" if judged else "right" if score == 1 else "wrong"


def drawn(table: AbilityTable, names: list[str]) -> "Figure":
    """The abilities of one table against the stages."""
    figure = style.new_figure()
    axes = figure.subplots()
    shown = [row for row in table.rows if row.is_summary]
    shares = [row for row in shown if not row.name.startswith(PLAIN)]
    for row in [row for row in shown if row not in shares] or shares:
        axes.plot(range(len(names)), [float("nan") if value is None else value for value in row.values], "o-", label=row.name)
    axes.set_xticks(range(len(names)), names)
    axes.set(title=table.title, ylabel="share" if len(shares) == len(shown) else next(row.name for row in shown if row not in shares))
    if len(shares) == len(shown):
        axes.set_ylim(0, 1.02)
        figure.legend(loc="outside right center")
    return figure


def show(pipeline: Pipeline, console: Console) -> None:
    """The summary rows of the tables, in the terminal."""
    for each in ability_tables(pipeline):
        table = Table(title=each.title, title_justify="left")
        for name in ("", *(stage.name for stage in pipeline.stages)):
            table.add_column(name, justify="right" if name else "left")
        for row in each.rows:
            table.add_row(row.name, *(f"{shown}{ {'better': ' ▲', 'worse': ' ▼'}.get(change, '  ') }" for shown, change in row.cells))
        console.print(table)
