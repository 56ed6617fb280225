"""Chapter 12. Evaluation of a model in some tasks: its figures as plain numbers, and as JSON with what each item adds.

    evaluate_run(Path("runs/laptop")).numbers()     {"text/bits_per_byte": 1.9, "next_line/acc": 0.4, "sum/exact_match": 0.1, ...}
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from shared.output_files import write_atomically
from shared.trainer.evaluation.built_in import BUILT_IN, built_in
from shared.trainer.evaluation.measures import Judge, TaskResult, measure, requests_of
from shared.trainer.evaluation.subject import Subject, open_subject
from shared.trainer.evaluation.tasks import Loaded

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
        """What is written as JSON: settings, figures with their errors, what each item adds, and what the model wrote."""
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

    Raises:
        CourseError: there is no such model, or it cannot be measured.
    """
    subject = open_subject(path, **opened)
    tasks = [built_in(name) for name in BUILT_IN] if tasks is None else tasks
    return evaluate_subject(subject, [Loaded(each.name, each.task, each.items[:limit]) for each in tasks], console)


def evaluate_subject(subject: Subject, tasks: Sequence[Loaded], console: Console | None = None) -> Evaluation:
    results = []
    with Judge() as judge, Progress(console=console, disable=console is None or not console.is_terminal, transient=True) as bar:
        for each in tasks:
            row = bar.add_task(each.name, total=requests_of(each))
            results.append(measure(subject, each, judge, lambda count, row=row: bar.advance(row, count)))
    return Evaluation(subject.path, results)
