"""Chapter 12. `course eval`: the figures of a model as a table, as JSON beside the run, and beside another model's.

    course eval runs/laptop                              the built-in tasks
    course eval runs/laptop --data notes.txt             bits per byte of a text
    course eval runs/laptop_sft --compare runs/laptop    two models, with the interval of their paired difference
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.course import terminal
from shared.course.errors import CourseError, SettingError
from shared.data.source import Source
from shared.engine.checkpoint.folder import STATE
from shared.finetune.gguf.packaged import is_gguf
from shared.finetune.gguf.unpack import unpacked
from shared.output_files import require_writable, write_atomically
from shared.rl.examination import TaskChecks
from shared.trainer.evaluation.built_in import BUILT_IN, built_in
from shared.trainer.evaluation.measures import Subject, TaskResult, measure, open_subject, requests_of
from shared.trainer.evaluation.tasks import EvalTask, Loaded, load_task, open_task

FORMAT = 1  # of the JSON


@dataclass(frozen=True)
class Evaluation:
    """A model's results."""

    path: Path
    results: list[TaskResult]

    def numbers(self) -> dict[str, float]:
        """"task/metric" -> the figure."""
        return {f"{each.loaded.name}/{name}": metric.mean for each in self.results for name, metric in each.metrics.items()}

    def errors(self) -> dict[str, float]:
        """"task/metric" -> its standard error; NaN for a task of a single item."""
        return {f"{each.loaded.name}/{name}": metric.error for each in self.results for name, metric in each.metrics.items()}

    def record(self) -> dict[str, Any]:
        """The results as JSON: settings, figures with standard errors, the value of each item, and the generated answers."""
        return {
            "format": FORMAT,
            "model": str(self.path),
            "tasks": {
                each.loaded.name: {
                    "settings": asdict(each.loaded.task),
                    "items": len(each.loaded.items),
                    "metrics": {
                        name: {"value": metric.mean, "error": none_for_nan(metric.error), "items": list(metric.values)}
                        for name, metric in each.metrics.items()
                    },
                    "answers": each.answers,
                }
                for each in self.results
            },
        }

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.record(), indent=1, allow_nan=False).encode())


def none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def evaluate_run(
    path: Path,
    tasks: Sequence[Loaded] | None = None,
    *,
    limit: int | None = None,
    console: Console | None = None,
    **opened: Any,
) -> Evaluation:
    """Evaluate a run, a checkpoint or a folder of Hugging Face's format.

    Args:
        tasks: None for the built-in ones.
        limit: of each task, at most so many items.
        console: where a progress bar is shown.
        opened: batch_tokens, device, precision, as for `open_subject`.
    """
    subject = open_subject(path, **opened)
    tasks = [built_in(name) for name in BUILT_IN] if tasks is None else tasks
    return evaluate_subject(subject, [Loaded(each.name, each.task, each.items[:limit]) for each in tasks], console)


def evaluate_subject(subject: Subject, tasks: Sequence[Loaded], console: Console | None = None) -> Evaluation:
    results = []
    with TaskChecks() as check, Progress(console=console, disable=console is None or not console.is_terminal, transient=True) as bar:
        for each in tasks:
            row = bar.add_task(each.name, total=requests_of(each))
            results.append(measure(subject, each, check, lambda count, row=row: bar.advance(row, count)))
    return Evaluation(subject.path, results)


def evaluate_and_show(
    console: Console, path: Path, tasks: Sequence[Loaded], other: Path | None, output: Path | None, **opened: object
) -> None:
    """Evaluate a model, or two, show the table and write the JSON.

    Args:
        output: of the JSON; None for the model's folder.
        opened: as for `open_subject`.
    """
    output = output or output_beside(path)
    if path.is_dir():  # what is no model is said by who opens it
        require_writable(output.parent)
    found = evaluate_run(path, tasks, console=console, **opened)
    beside = evaluate_run(other, tasks, console=console, **opened) if other else None
    console.print(table_of(found, beside))
    found.save(output)
    terminal.say(console, f"± is the standard error. Every item and what the model wrote: {output}")


def tasks_of(names: Sequence[str], data: Sequence[str], limit: int | None, samples: int | None) -> list[Loaded]:
    """The tasks of a command: texts, built-in tasks and YAML files; all built-in tasks by default."""
    found = [open_task(Path(text).name, EvalTask("text", Source(path=text), limit=limit)) for text in data]
    for name in names or ([] if data else BUILT_IN):
        path = Path(name).expanduser()
        found.append(load_task(path, limit) if path.suffix in (".yaml", ".yml") else built_in(name))
    names = [each.name for each in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingError(f"Two tasks are called {twice[0]}: give each once, and files of different names.")
    return [
        replace(each, task=replace(each.task, samples=each.task.samples if samples is None else samples), items=each.items[:limit])
        for each in found
    ]


def output_beside(path: Path) -> Path:
    """The default path of a model's results: in its folder, or for a checkpoint in its run's folder."""
    path = unpacked(path) if is_gguf(path) else path
    return path.parent.parent / f"eval-{path.name}.json" if (path / STATE).is_file() else path / "eval.json"


def table_of(found: Evaluation, other: Evaluation | None = None) -> Table:
    """Each figure with its standard error; beside another model's, the paired difference with its 95 % interval."""
    if other is not None:
        table = table_with(f"{found.path} beside {other.path}", "first", "second", "difference", "95 % interval")
        for mine, theirs in zip(found.results, other.results, strict=True):
            for name, metric in mine.metrics.items():
                difference = metric.minus(theirs.metrics[name])
                interval = " to ".join(f"{end:+.4f}" for end in difference.interval)
                figures = (f"{metric.mean:.4f}", f"{theirs.metrics[name].mean:.4f}", f"{difference.mean:+.4f}")
                table.add_row(mine.loaded.name, name, *figures, "" if math.isnan(difference.error) else interval)
        return table
    table = table_with(str(found.path), "items", "value")
    for each in found.results:
        for name, metric in each.metrics.items():
            table.add_row(each.loaded.name, name, f"{len(each.loaded.items):,}", with_error(metric.mean, metric.error))
    return table


def table_with(title: str, *numbers: str) -> Table:
    table = Table("task", "metric", title=title, box=box.SIMPLE)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def with_error(value: float, error: object) -> str:
    """lm-eval writes "N/A" where there is no standard error."""
    return f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) and not math.isnan(error) else "")


def run_harness(
    console: Console,
    path: Path,
    names: list[str],
    include_path: str | None,
    limit: int | None,
    shots: int | None,
    chat: bool,
    output: Path | None,
    **opened: object,
) -> None:
    """Hand tasks over to lm-eval, show its figures and write its results as JSON."""
    try:
        from shared.trainer.evaluation import lm_eval_adapter
    except ImportError as error:
        raise CourseError(f"lm-eval is not installed ({error}): pip install lm_eval==0.4.13") from None
    subject = open_subject(path, **opened)
    found = lm_eval_adapter.run_tasks(subject, [name.strip() for name in names], include_path, limit, shots, chat)
    table = table_with(f"{path}, by lm-eval", "value")
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, selected = name.partition(",")
            error = metrics.get(f"{metric}_stderr,{selected}")
            if isinstance(value, int | float) and selected and not metric.endswith("_stderr"):
                table.add_row(task, metric, with_error(value, error))
    console.print(table)
    output = output or output_beside(path).with_stem("lm_eval")
    kept = {name: found[name] for name in ("results", "configs", "versions", "n-shot", "n-samples") if name in found}
    write_atomically(output, json.dumps(kept, indent=1, default=str).encode())
    terminal.say(console, f"± is the standard error. Results and settings: {output}")
