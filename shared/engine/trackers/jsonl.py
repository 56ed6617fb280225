"""Chapter 04. Metrics as a file that everything can read: one JSON object a line, in the order of the steps.

    {"step": 20, "train/loss": 2.31, "speed/tokens_per_second": 5120.4}

Left out on purpose: settings (the engine writes its configuration beside the file) and rotation.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shared.engine.callbacks import Callback, Metrics
from shared.engine.json_numbers import from_json, to_json

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine


class JsonlTracker(Callback):
    """Appends a line for each log, at once: a killed run has all lines but the one that was being written.

    Args:
        path: of the file; None for `metrics.jsonl` in the run's folder.

    A resumed run cuts the lines after the step that it goes on from. A run from step 0 moves a file that is there aside, under the
    first free name metrics.1.jsonl, metrics.2.jsonl, ...
    """

    def __init__(self, path: Path | str | None = None):
        self.path = Path(path) if path else None
        self.file: TextIO | None = None

    def on_start(self, engine: "RuntimeEngine") -> None:
        self.path = self.path or engine.output / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if engine.step:
                cut_after(self.path, engine.step)
            else:
                move_aside(self.path)
        self.file = self.path.open("a", encoding="utf-8")

    def on_log(self, engine: "RuntimeEngine", metrics: Metrics) -> None:
        self.file.write(json.dumps({"step": engine.step} | to_json(metrics)) + "\n")
        self.file.flush()

    def on_end(self, engine: "RuntimeEngine") -> None:
        if self.file is not None:
            self.file.close()


def read_jsonl(path: Path | str) -> dict[int, Metrics]:
    """Step -> metrics, of all lines of that step. A last line that a killed run left half written is no line."""
    metrics: dict[int, Metrics] = {}
    for row in map(json.loads, whole_lines(Path(path))):
        metrics.setdefault(row.pop("step"), {}).update(from_json(row))
    return metrics


def cut_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`, by way of a second file, so that a crash leaves the old one or the new one."""
    kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= step]
    beside = path.with_name(path.name + ".partial")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)


def whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def move_aside(path: Path) -> None:
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(free)
