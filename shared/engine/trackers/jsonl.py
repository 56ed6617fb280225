"""Chapter 04. Metrics as JSON lines, `metrics.jsonl`: one JSON object for each log, in the order of the steps.

    {"step": 20, "train/loss": 2.31, "speed/tokens_per_second": 5120.4}

A run that diverges is the one whose metrics somebody will want to read, and JSON has no words for NaN and Infinity: Python would write
them bare, which other readers refuse. Here they are the strings "nan", "inf" and "-inf".

Left out on purpose: settings (the engine writes its configuration beside the file) and rotation.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shared.engine.callbacks import Callback, Metrics
from shared.output_files import write_atomically

if TYPE_CHECKING:
    from shared.engine.engine import RuntimeEngine


class JsonlTracker(Callback):
    """Appends a line for each log, at once: a killed run has all lines but the one that was being written.

    Args:
        path: of the file; None for `metrics.jsonl` in the run's folder.

    A resumed run cuts the lines after the step from which it resumes. A run from step 0 renames a file that exists already to the
    first free name metrics.1.jsonl, metrics.2.jsonl, ...
    """

    expendable = True

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


def to_json(value: Any) -> Any:
    """Nested dictionaries and lists, with numbers that JSON cannot hold as strings.

    >>> to_json({"train/loss": 2.5, "norm/gradient": float("nan")})
    {'train/loss': 2.5, 'norm/gradient': 'nan'}
    """
    if isinstance(value, dict):
        return {name: to_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(value: Any) -> Any:
    """What `to_json` was given, tuples as lists."""
    if isinstance(value, dict):
        return {name: from_json(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [from_json(entry) for entry in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def read_jsonl(path: Path | str) -> dict[int, Metrics]:
    """Step -> metrics, of all lines of that step. A last line that a killed run left half written is no line."""
    metrics: dict[int, Metrics] = {}
    for row in map(json.loads, whole_lines(Path(path))):
        metrics.setdefault(row.pop("step"), {}).update(from_json(row))
    return metrics


def cut_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`."""
    kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= step]
    write_atomically(path, "".join(kept).encode())


def whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def move_aside(path: Path) -> None:
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(free)
