"""Chapter 04. Metrics as JSON lines, `metrics.jsonl`: one JSON object for each log, in the order of the steps.

    {"step": 20, "train/loss": 2.31, "speed/tokens_per_second": 5120.4}

A log never ends a run. Lines that do not fit on the disk are kept in memory; a damaged file is renamed, and its readable lines are copied
to a new one.

JSON has no NaN and Infinity, which the metrics of a run that diverges have: Python would write them bare, which other readers refuse. Here
they are the strings "nan", "inf" and "-inf".

Left out on purpose: settings (the engine writes its configuration beside the file) and rotation.
"""

import errno
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, Metrics, RunState
from shared.output_files import write_atomically, writing


class JsonlTracker(Callback):
    """Appends a line for each log, at once: a killed run has all lines but the one that was being written.

    Args:
        path: of the file; None for `metrics.jsonl` in the run's folder.

    A resumed run cuts the lines after the step from which it resumes. A run from step 0 renames a file that exists already to the
    first free name metrics.1.jsonl, metrics.2.jsonl, ..., as a resumed run does with one that is damaged.
    """

    expendable = True

    def __init__(self, path: Path | str | None = None):
        self.path = Path(path) if path else None
        self.file: BinaryIO | None = None
        self.waiting: list[bytes] = []  # lines that are not on the disk yet
        self.told = False

    def on_start(self, engine: RunState) -> None:
        self.path = self.path or engine.output / "metrics.jsonl"
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.path):
                if engine.step:
                    self.cut_after(engine)
                else:
                    move_aside(self.path)
            self.file = self.path.open("ab", buffering=0)

    def cut_after(self, engine: RunState) -> None:
        """Keep the lines up to the engine's step. A damaged file is set aside whole, and its readable lines are copied to a new one."""
        lines, problem = readable_lines(self.path)
        if problem:
            aside = move_aside(self.path)
            show(engine, f"{self.path} is damaged ({problem}): it is kept as {aside}, its {len(lines):,} readable lines stay in use.")
        write_atomically(self.path, b"".join(line for row, line in lines if row["step"] <= engine.step))

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        self.waiting.append(json.dumps({"step": engine.step} | to_json(metrics)).encode() + b"\n")
        self.write(engine)

    def write(self, engine: RunState) -> None:
        """Append the lines that wait. Of a line that does not fit nothing stays in the file."""
        whole = self.file.seek(0, os.SEEK_END)
        try:
            while self.waiting:
                line = self.waiting[0]
                if self.file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                whole += len(self.waiting.pop(0))
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(whole)
            if not self.told:
                told = f"{self.path} cannot be written ({error.strerror}): free space there. Its lines wait in memory; training continues."
                show(engine, told)
            self.told = True

    def on_end(self, engine: RunState) -> None:
        if self.file is not None:
            self.write(engine)
            if self.waiting:
                show(engine, f"The last {len(self.waiting):,} logs are missing in {self.path}, for which there was no room.")
            self.file.close()


def show(engine: RunState, sentence: str) -> None:
    engine.console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)


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
    """Step -> metrics, of all lines of that step. A last line that a killed run left half written does not count.

    Raises:
        CourseError: the file cannot be read, or it has a line that `JsonlTracker` did not write.
    """
    metrics, problem = read_damaged(path)
    if problem:
        raise CourseError(f"{path} is damaged ({problem}): move it aside, or delete what cannot be read.")
    return metrics


def read_damaged(path: Path | str) -> tuple[dict[int, Metrics], str]:
    """The metrics of a file that may be damaged or missing, by step, and an error message about the rest; "" if there is none."""
    lines, problem = readable_lines(Path(path))
    metrics: dict[int, Metrics] = {}
    for row, _ in lines:
        numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        metrics.setdefault(row["step"], {}).update(numbers)
    return metrics, problem


def readable_lines(path: Path) -> tuple[list[tuple[dict[str, Any], bytes]], str]:
    """The rows that can be read, each with its line, and what is wrong with the others."""
    try:
        if path.exists() and not path.is_file():  # a pipe would keep its reader waiting
            return [], "it is not a file"
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        return [], error.strerror
    rows = [parsed(line) for line in lines]
    bad = [number for number, row in enumerate(rows, start=1) if row is None]
    problem = f"{len(bad):,} of its {len(lines):,} lines cannot be read, the first is line {bad[0]}" if bad else ""
    return [(row, line + b"\n") for row, line in zip(rows, lines, strict=True) if row is not None], problem


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line's row; None if it is not an object with a step."""
    try:
        row = from_json(json.loads(line))
        return row if type(row["step"]) is int else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def move_aside(path: Path) -> Path:
    """Rename a file, or what is in its place, to the first free name with a number in it, which is returned."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return path.rename(free)
