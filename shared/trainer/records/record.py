"""Chapter 12. Run records, for a list of runs and a comparison of runs: what a run's folder says of it, whichever mode it is of, while it
runs, afterwards, and where files are damaged.

    config.yaml    settings, written at each start        metrics.jsonl   figures by step
    run.lock       held by a process that runs            results.json    the summary, written last
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError
from shared.course.typed import configured
from shared.engine.trackers.jsonl import read_damaged
from shared.folder_lock import NAME as LOCK
from shared.folder_lock import is_held
from shared.parallel.config import ParallelConfig, layout_name
from shared.trainer import provenance

METRICS, RESULTS = "metrics.jsonl", "results.json"
DEEPEST = 4  # levels of folders that are searched
MEASURES = (  # in this order: what a run is judged by, in its summary or its metrics -> its words in a table
    ("held-out tasks right after", "tasks right"),
    ("win rate over the first model, by the hidden preference", "win rate"),
    ("held-out pairs ranked right", "pairs right"),
    ("held-out bits per byte", "bits per byte"),
    ("validation/bits_per_byte", "bits per byte"),
    ("validation/accuracy", "pairs right"),
    ("rollout/reward", "reward"),
    ("validation/loss", "held-out loss"),
)
Rows = dict[int, dict[str, float]]


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Args:
        settings: resolved; empty where they cannot be read.
        metrics: step -> name -> value.
        summary: name -> value, of a run that has ended.
        state: "running", "finished", "stopped" (by a signal or an error: the same command resumes it) or "killed" (it could not even free
            its folder).
        problems: what cannot be read, in words.
    """

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: Rows = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    state: str = "stopped"
    problems: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        return str(self.settings.get("mode", "?"))

    @property
    def step(self) -> int:
        return max(self.metrics, default=0)

    @property
    def steps(self) -> int | None:
        """The last step, as the configuration says it."""
        return steps if isinstance(steps := self.settings.get("steps"), int) else None

    @property
    def layout(self) -> str:
        try:
            parallel = configured(ParallelConfig, self.settings.get("parallel", {}))
            return layout_name(parallel) + f" ({parallel.backend})" * (parallel.backend != "course")
        except CourseError:  # of another version of the trainer
            return "?"

    @property
    def changed(self) -> datetime:
        """Time of the run's last write."""
        times = [path.stat().st_mtime for name in (provenance.CONFIG, METRICS, RESULTS) if (path := self.folder / name).is_file()]
        return datetime.fromtimestamp(max(times, default=0.0))

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        return next((row[name] for _, row in sorted(self.metrics.items(), reverse=True) if name in row), None)

    def median(self, name: str) -> float | None:
        values = sorted(row[name] for row in self.metrics.values() if name in row)
        return values[len(values) // 2] if values else None

    def measure(self) -> tuple[str, float] | None:
        """The run's main measure: its name in a table, and its value."""
        for name, words in MEASURES:
            if isinstance(value := self.summary.get(name, self.last(name)), int | float):
                return words, value
        return None

    def memory(self) -> float | None:
        """Peak memory of a process, GiB; the GPU's if there is one."""
        peak = self.summary.get("peak memory, GiB")
        if isinstance(peak, int | float):
            return peak
        names = ("memory/gpu_peak_gib", "memory/resident_gib")
        return next((max(found) for name in names if (found := [row[name] for row in self.metrics.values() if name in row])), None)


def read_run(folder: Path) -> RunRecord:
    """The run of a folder, as far as it can be read.

    Raises:
        CourseError: it holds no run.
    """
    if not is_run(folder):
        raise CourseError(f"{folder} holds no run ({provenance.CONFIG}, {METRICS}): `course runs FOLDER` lists what runs a folder has.")
    problems = []
    try:
        settings = provenance.read_record(folder / provenance.CONFIG)
    except CourseError:
        settings = {}
        problems.append(f"{provenance.CONFIG} cannot be read")
    metrics, damage = read_damaged(folder / METRICS) if (folder / METRICS).exists() else ({}, "")
    problems += [f"{METRICS}: {damage}"] * bool(damage)
    results, damage = provenance.read_object(folder / RESULTS)
    problems += [damage] * bool(damage)
    code, _ = provenance.read_object(folder / provenance.CODE)
    summary = results.get("summary", {}) if isinstance(results.get("summary", {}), dict) else {}
    values = {name: value for name, value in summary.items() if value is None or isinstance(value, str | int | float)}
    found = RunRecord(folder, settings, metrics, values, code, problems=tuple(problems))
    return replace(found, state=state_of(found))


def state_of(run: RunRecord) -> str:
    """Whether a run has ended. Each start writes the configuration again, so results that are older are those of an earlier start."""
    if is_held(run.folder):
        return "running"
    results, config = (run.folder / name for name in (RESULTS, provenance.CONFIG))
    is_complete = run.steps is not None and run.step >= run.steps
    if results.is_file() and (is_complete or not config.is_file() or results.stat().st_mtime >= config.stat().st_mtime):
        return "finished"
    return "killed" if (run.folder / LOCK).exists() else "stopped"


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (provenance.CONFIG, METRICS))


def find_runs(folder: Path) -> Iterator[Path]:
    """Folders of runs in and below a folder, in the order of their names. Nothing within a run is one."""
    for place, names, _ in os.walk(folder):
        here = Path(place)
        if is_run(here):
            names.clear()
            yield here
        deepest = len(here.parts) - len(folder.parts) >= DEEPEST
        names[:] = [] if deepest else sorted(name for name in names if not name.startswith("."))
