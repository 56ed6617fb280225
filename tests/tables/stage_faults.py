"""Runs over processes in which one rank of a layout is killed, and what follows: `python tests/tables/stage_faults.py` prints the table.

A rank is killed in step 4 of 5: in its forward pass, its backward pass, or as it writes its part of a checkpoint. Two steps lie between
two saves.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parents[1])]

import cloudpickle  # noqa: E402
import torch  # noqa: E402
from layout_runs import LayoutRun, largest_difference  # noqa: E402
from pipeline_runs import make, on_ranks, runner_of  # noqa: E402
from torch import Tensor  # noqa: E402

from shared.engine.checkpoint import files  # noqa: E402
from shared.parallel.comm.communicator import CommunicationError, Communicator  # noqa: E402
from shared.parallel.config import parse_layout  # noqa: E402
from shared.parallel.health import heartbeat  # noqa: E402
from shared.parallel.health.heartbeat import Timeouts  # noqa: E402
from shared.parallel.processes import launch  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS, SAVED, BROKEN = 5, 2, 4  # steps of a run, those between two saves, and the one that breaks, from 1
TIMEOUTS = Timeouts(heartbeat_timeout=30.0, collective_timeout=600.0, heartbeat_interval=0.2)
PLACES = ("forward", "backward", "save")


@dataclass(frozen=True)
class Fault:
    """layout, schedule: of the run. rank: which one is killed. place: where. resumed: the layout that continues."""

    layout: str
    schedule: str
    rank: int
    place: str
    resumed: str


@dataclass(frozen=True)
class Found:
    """error: what the run's caller gets. told: by rank, after how many seconds it ended, and why. step: from which the run continued.
    difference: of its weights to those of a run to which nothing happened."""

    error: str
    told: dict[int, tuple[float, str]]
    step: int
    difference: float

    def require_killed_rank_named(self, layout: str, rank: int) -> None:
        """The command and all other ranks, within the time that a silent rank has, name the one that was killed."""
        ranks = parse_layout(layout).ranks
        assert f"rank {rank} of {ranks} ended with signal SIGKILL" in self.error
        assert self.told.keys() == set(range(ranks)) - {rank}
        for seconds, sentence in self.told.values():
            assert f"rank {rank} has sent no heartbeat" in sentence and seconds < 2 * TIMEOUTS.heartbeat_timeout

    def require_resumed(self, layout: str, resumed: str) -> None:
        """From step 2, to the same weights."""
        assert self.step == BROKEN - SAVED, "step 4 was not saved by all"
        assert self.difference == 0 if resumed == layout else self.difference < 1e-9


def killed(world: Communicator, fault: Fault, folder: Path) -> None:
    """The run until a rank is killed. The others note why they end: by an exception, or by the watchdog, where an operation does not
    return."""

    def note(reason: object) -> None:
        (folder / f"told-{world.rank}").write_text(f"{time.time()} {reason}")

    heartbeat.end_process = before(note, heartbeat.end_process)
    run = make(world, fault.layout, "gpt2", "adamw", fault.schedule)
    try:
        for step in range(1, STEPS + 1):
            if step == BROKEN and world.rank == fault.rank:
                arm(run, fault.place, lambda: kill(folder))
            run.train(1)
            if step % SAVED == 0:
                run.save(folder / "checkpoints", asynchronous=False)
    except CommunicationError as error:
        note(error)
        raise


def kill(folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def arm(run: LayoutRun, place: str, end: Callable[[], None]) -> None:
    """Call `end` in the second forward or backward pass of the coming step, or when a checkpoint's shards have been written in part."""
    if place == "save":
        files.write_shards = at_call(2, end, files.write_shards)
    elif run.mesh.pp.size > 1:
        runner = runner_of(run)
        setattr(runner, place, at_call(2, end, getattr(runner, place)))
    elif place == "forward":
        run.objective = at_call(2, end, run.objective)
    else:
        next(run.plain.parameters()).register_hook(lambda gradient: end())


def at_call(number: int, end: Callable[[], None], function: Callable) -> Callable:
    """The function, which ends in its call of this number."""

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal number
        number -= 1
        return function(*arguments, **options) if number else end()

    return counted


def before(first: Callable, function: Callable) -> Callable:
    """Both functions, with the same arguments."""

    def both(*arguments: Any) -> Any:
        first(*arguments)
        return function(*arguments)

    return both


def weights_of(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of a pipeline's ranks, which have their stage's each; without key biases, whose gradients are rounding."""
    return {name: tensor for each in found for name, tensor in each.items() if not name.endswith("k_proj.bias")}


def uninterrupted(layout: str, schedule: str) -> dict[str, Tensor]:
    return weights_of(on_ranks(lambda run: run.train(STEPS).weights(), layout, "gpt2", "adamw", schedule))


def follow(fault: Fault, folder: Path) -> Found:
    """Break a run, then continue it on threads."""
    error = ""
    with patch.object(launch, "GRACE", 60.0):  # the others can say what they find
        try:
            launch.run_processes(killed, parse_layout(fault.layout).ranks, fault, folder, timeout=300, timeouts=TIMEOUTS)
        except CommunicationError as raised:
            error = str(raised).splitlines()[0].rstrip(":")
    at = float((folder / "killed").read_text())
    noted = {int(path.name.split("-")[1]): path.read_text().split(" ", 1) for path in folder.glob("told-*")}
    told = {rank: (float(when) - at, sentence) for rank, (when, sentence) in sorted(noted.items())}
    steps = []

    def resume(run: LayoutRun) -> dict[str, Tensor]:
        steps.append(run.restore(folder / "checkpoints").step)
        return run.train(STEPS - run.step).weights()

    schedule = fault.schedule if fault.resumed.startswith("pp") else "1f1b"  # which is not read without a pipeline
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks in processes have: with more, sums are added in another order
    weights = weights_of(on_ranks(resume, fault.resumed, "gpt2", "adamw", schedule, seed=9))
    expected = uninterrupted(fault.layout, fault.schedule)
    torch.set_num_threads(threads)
    same = weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    return Found(error, told, steps[0], 0.0 if same else largest_difference(weights, expected))


TABLE = [
    *(Fault("pp4", "1f1b", rank, place, resumed) for rank, place, resumed in [
        (0, "forward", "pp4"), (0, "backward", "pp2"), (0, "save", "one"), (1, "forward", "pp2"), (2, "backward", "pp4"),
        (1, "save", "pp4"), (3, "forward", "one"), (3, "backward", "pp4"), (3, "save", "pp2")]),
    Fault("pp2", "1f1b", 0, "forward", "one"), Fault("pp2", "1f1b", 1, "backward", "dp2"), Fault("pp2", "interleaved", 1, "forward", "pp2"),
    Fault("pp2", "zero_bubble", 0, "backward", "pp2"), Fault("pp2_dp2", "1f1b", 3, "forward", "pp2"),
]  # fmt: skip


def table() -> Iterator[str]:
    yield "| layout, schedule | rank killed | in | the command | survivors | resumed on | from step | largest difference in weights |"
    yield "|---|---|---|---|---|---|---|---|"
    for fault in TABLE:
        with tempfile.TemporaryDirectory() as folder:
            found = follow(fault, Path(folder))
        first = min(found.told.values(), default=(float("nan"), "none said anything"))
        told = f"{len(found.told)}, the first after {first[0]:.1f} s: {first[1]}"
        yield (
            f"| {fault.layout}, {fault.schedule} | {fault.rank} | {fault.place} | {found.error} | {told} | {fault.resumed} | {found.step} "
            f"| {found.difference:.0e} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table():
        print(line, flush=True)
