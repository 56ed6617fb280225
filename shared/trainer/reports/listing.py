"""Chapter 12. List of runs: what each is, how far it came, how good it is and what it takes (`course runs`)."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.course import terminal
from shared.course.errors import CourseError
from shared.trainer.records.record import RunRecord, find_runs, read_run

COLUMNS = ("run", "mode", "state", "step", "loss", "measure", "tok/s", "GiB", "layout", "changed")
RIGHT = ("step", "loss", "tok/s", "GiB")
WRAPPED = ("run", "measure", "layout")
STYLES = {"running": "bold green", "finished": "", "stopped": "yellow", "killed": "red"}
PIPED = 200  # columns of a table that no terminal shows


def list_runs(console: Console, folder: Path) -> None:
    """Print a table of the runs in and below a folder, the latest last."""
    runs = sorted(map(read_run, find_runs(folder)), key=lambda run: run.changed)
    if not runs:
        raise CourseError(f"{folder} holds no runs: give the folder that they are in. `make run` writes to runs/.")
    if not console.is_terminal:
        console.width = PIPED
    console.print(table_of(runs, folder, COLUMNS if console.width >= 100 else COLUMNS[:-2]))
    for run in runs:
        for problem in run.problems:
            terminal.say(console, terminal.printable(f"{run.folder}: {problem}."), "yellow")


def table_of(runs: Sequence[RunRecord], folder: Path, columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in RIGHT else "left", overflow="fold", no_wrap=column not in WRAPPED)
    for run in runs:
        row = row_of(run, folder)
        table.add_row(*(Text(terminal.printable(row[column]), STYLES[run.state] if column == "state" else "") for column in columns))
    return table


def row_of(run: RunRecord, folder: Path) -> dict[str, str]:
    """Column -> text."""
    measure = run.measure()
    return dict(
        zip(
            COLUMNS,
            (
                str(run.folder.relative_to(folder)) if run.folder != folder else run.folder.resolve().name,
                run.mode,
                run.state,
                f"{run.step}/{run.steps or '?'}",
                shown("", run.last("train/loss")),
                f"{measure[0]} {shown(*measure)}" if measure else "",
                shown("", run.median("speed/tokens_per_second")),
                shown("", run.memory()),
                run.layout,
                f"{run.changed:%H:%M}" if run.changed.date() == date.today() else f"{run.changed:%Y-%m-%d}",
            ),
            strict=True,
        )
    )


def format_value(name: str, value: Any) -> str:
    """A value of the summary as text."""
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if "difference" in name:  # first, because the rest of its name is a folder's
        return f"{value:.1e}"
    if any(word in name for word in ("right", "utilisation", "win rate")):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def shown(name: str, value: Any) -> str:
    """A value as the report of a run writes it; nothing where there is none."""
    return "" if value is None else format_value(name, value)
