"""Chapter 12. Comparison of runs: settings that differ, results, and curves over each other, in the terminal and as one HTML page
(`course report A B`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.course import terminal
from shared.course.errors import CourseError
from shared.engine.trackers.services import flat
from shared.output_files import write_atomically
from shared.trainer.records.record import RunRecord, read_run
from shared.trainer.reports.listing import PIPED, shown
from shared.trainer.reports.page import embedded, page, plot, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {  # metric -> the figure's label
    "train/loss": "training loss",
    "validation/loss": "loss of held-out files",
    "validation/bits_per_byte": "bits per byte of held-out files",
    "validation/accuracy": "share of held-out pairs ranked right",
    "rollout/reward": "mean reward of an answer",
    "rollout/kl_to_reference": "KL to the first model, nats per answer",
    "rollout/answer_tokens": "tokens of an answer",
    "train/entropy": "entropy, nats per token",
    "norm/gradient": "gradient norm",
    "speed/tokens_per_second": "tokens per second",
    "memory/resident_gib": "memory of the process, GiB",
    "memory/gpu_peak_gib": "peak of the GPU's memory, GiB",
}
AGAINST_TOKENS = "train/loss"  # drawn against training tokens too, where runs take another number of them in a step
OWN = ("engine.output", "data.prepared")  # settings that each run has for itself
CODE = ("commit", "torch", "machine")
Rows = list[tuple[str, list[str]]]


def report_runs(console: Console, folders: Sequence[Path], path: Path) -> None:
    """Print the tables of several runs, and write the page."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise CourseError("One run is given twice: give different ones.")
    runs = [read_run(folder) for folder in folders]
    if not console.is_terminal:
        console.width = PIPED
    names = names_of(folders)
    for title, rows in tables(runs).items():
        if not rows:
            console.print(f"{title}: none.\n", highlight=False)
            continue
        table = Table("", *names, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, values in rows:
            table.add_row(*map(Text, (name, *values)))
        console.print(table)
    for run in runs:
        for problem in run.problems:
            terminal.say(console, f"{run.folder}: {problem}.", "yellow")
    write_page(path, names, runs)
    console.print(f"Curves over each other: {path}", markup=False, soft_wrap=True)


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two have the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(map(str, folders))


def tables(runs: Sequence[RunRecord]) -> dict[str, Rows]:
    return {"Results": results(runs), "Settings that differ": differences(runs)}


def results(runs: Sequence[RunRecord]) -> Rows:
    """The results of each run: its state, and its summary or, before its end, its last metrics."""
    progress = {
        "mode": [run.mode for run in runs],
        "state": [run.state for run in runs],
        "step": [f"{run.step:,} of {run.steps or '?'}" for run in runs],
        "layout": [run.layout for run in runs],
    }
    measured = [
        {
            "last training loss": run.last("train/loss"),
            "last held-out loss": run.last("validation/loss"),
            "tokens per second": run.median("speed/tokens_per_second"),
            "peak memory, GiB": run.memory(),
        }
        | run.summary
        for run in runs
    ]
    rows = {name: [shown(name, each.get(name)) for each in measured] for name in dict.fromkeys(name for each in measured for name in each)}
    return [(name, values) for name, values in (progress | rows).items() if any(values)]


def differences(runs: Sequence[RunRecord]) -> Rows:
    """Settings and facts of the code's version that differ between runs."""
    settings = [flat(run.settings) | {f"code: {name}": run.code.get(name) for name in CODE} for run in runs]
    rows = []
    for name in dict.fromkeys(name for each in settings for name in each):
        values = [plain_text(each[name]) if name in each else "" for each in settings]
        if len(set(values)) > 1 and name not in OWN:
            rows.append((name, values))
    return rows


def plain_text(value: Any) -> str:
    """A setting in YAML's spelling."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def write_page(path: Path, names: Sequence[str], runs: Sequence[RunRecord]) -> None:
    content = page(
        Path(__file__).with_name("side_by_side.html"), title=" beside ".join(names), names=names, tables=tables(runs),
        pictures=embedded(drawn(names, runs)), problems=[f"{run.folder}: {problem}" for run in runs for problem in run.problems],
    )  # fmt: skip
    write_atomically(path, content)


def drawn(names: Sequence[str], runs: Sequence[RunRecord]) -> dict[str, "Figure"]:
    """Figures of the metrics that at least one run logged, by label."""
    found = {}
    for metric, label in CURVES.items():
        lines = {name: points for name, run in zip(names, runs, strict=True) if (points := series(run.metrics, metric))}
        if lines:
            found[label] = plot(lines, label)
    sizes = {(data.get("batch_size"), data.get("seq")) for run in runs if isinstance(data := run.settings.get("data"), dict)}
    if len(sizes) > 1:
        lines = {name: series(run.metrics, AGAINST_TOKENS, "progress/tokens") for name, run in zip(names, runs, strict=True)}
        label = CURVES[AGAINST_TOKENS]
        found[f"{label} by tokens"] = plot({name: points for name, points in lines.items() if points}, label, "training tokens")
    return found
