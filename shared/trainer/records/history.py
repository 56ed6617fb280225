"""Chapter 12. Event log of a run, `history.jsonl` in its folder: which ranks were there from which step on, and which settings changed.

A line is appended in one write, because ranks may add theirs at the same time.
"""

import json
import os
import platform
from collections import Counter
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from shared.engine.callbacks import Callback, RunState
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import layout_name
from shared.parallel.processes.torchrun import broken_connections_named, whole_number
from shared.trainer.config import TrainerConfig

FILE = "history.jsonl"


def append(output: Path, event: dict[str, Any]) -> None:
    """Add an event to the history of the run in this folder."""
    event = {"time": datetime.now().astimezone().isoformat(" ", "seconds")} | event
    with (output / FILE).open("ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\n")


def events_of(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's history, oldest first; a line that a crash cut off is left out. Empty where a run has none."""
    found = []
    with suppress(FileNotFoundError):
        for line in (output / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


class Change(NamedTuple):
    """What a run was continued with after a step. settings: key -> [before, after]. remarks: sentences. source: the checkpoint of another
    folder that it was continued from; "" for its own."""

    time: str
    step: int
    settings: dict[str, list[Any]]
    remarks: list[str]
    source: str


def changes_of(output: Path) -> list[Change]:
    """Changes of a run, oldest first."""
    found: list[Change] = []
    for event in events_of(output):
        if event.get("event") == "settings":
            change = Change(event["time"], event["step"], event["changed"], event["remarks"], "")
        elif event.get("event") == "continued":
            change = Change(event["time"], event["step"], {}, [], event["from"])
        else:
            continue
        if not found or found[-1]._replace(time="") != change._replace(time=""):  # else written again, after a kill
            found.append(change)
    return found


class History(Callback):
    """Logs in `history.jsonl` which ranks take part from which step on, and why they stop. Each rank logs its own end: one may be lost."""

    every_rank = expendable = True

    def __init__(self, config: TrainerConfig, world: Communicator):
        self.config, self.world, self.output = config, world, config.engine.output

    def on_start(self, engine: RunState) -> None:
        there = self.world.gather_objects(f"{platform.node()} (process {os.getppid()})")
        if self.world.rank == 0:
            idle = whole_number("GROUP_WORLD_SIZE", "1") * whole_number("LOCAL_WORLD_SIZE", "1") - self.world.size
            layout = {"layout": layout_name(self.config.parallel), "ranks": self.world.size, "idle": idle, "there": Counter(there)}
            append(self.output, {"event": "start", "step": engine.step} | layout)

    def on_error(self, engine: RunState, error: BaseException) -> None:
        try:
            with broken_connections_named(self.world):  # torch's own engines raise what they found, which names no rank
                raise error
        except BaseException as named:
            self.note_stop(engine, str(named) or type(named).__name__)

    def on_end(self, engine: RunState) -> None:
        if engine.stopped and self.world.rank == 0:
            self.note_stop(engine, f"asked to leave ({engine.stopped})" if engine.leaving else engine.stopped)

    def note_stop(self, engine: RunState, reason: str) -> None:
        append(self.output, {"event": "stop", "step": engine.step, "rank": self.world.rank, "reason": reason})


def note_end(config: TrainerConfig, world: Communicator) -> None:
    """Record that the run and its report are done; idle ranks wait for this event."""
    if config.elastic and world.rank == 0:
        append(config.engine.output, {"event": "end", "step": config.steps})


def has_ended(output: Path) -> bool:
    return [event["event"] for event in events_of(output)][-1:] == ["end"]


class Era(NamedTuple):
    """The steps from one start of the ranks to the next.

    step: the first is the one after it. lost: steps that were made before it and are made again. change: who left and who joined, or why
    the same ranks started again.
    """

    time: str
    step: int
    layout: str
    ranks: int
    idle: int
    lost: int
    change: str


def eras(output: Path) -> list[Era]:
    """The history of a run, for its report."""
    found: list[Era] = []
    before: Counter[str] = Counter()
    reached, reason = 0, ""
    for event in events_of(output):
        if event["event"] == "stop":
            reached, reason = max(reached, event["step"]), reason or event["reason"].split(";")[0]
        if event["event"] == "start":
            there = Counter(event["there"])
            changes = [f"{verb} {names(some)}" for verb, some in (("left:", before - there), ("joined:", there - before)) if some]
            change = "; ".join([*changes, reason] if reason else changes)
            lost = max(0, reached - event["step"])
            found.append(Era(event["time"], event["step"], event["layout"], event["ranks"], event["idle"], lost, change))
            before, reached, reason = there, event["step"], ""
    return found


def names(ranks: Counter[str]) -> str:
    """
    >>> names(Counter({"a (process 7)": 2, "b (process 9)": 1}))
    '2 ranks of a (process 7), 1 rank of b (process 9)'
    """
    return ", ".join(f"{count} rank{'s' * (count > 1)} of {name}" for name, count in ranks.items())
