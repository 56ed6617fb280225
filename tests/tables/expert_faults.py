"""Runs over processes in which a rank dies around an exchange of rows, is slow, or calls more of them than the others, and what follows.

python tests/tables/expert_faults.py         prints the tables

A step has two micro-batches and three layers with experts. Each layer calls three all-to-alls forward (numbers, rows, rows back) and two
backward. The fault happens in step 4 of 5; two steps lie between two saves.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "moe"), str(HERE.parents[1])]

import cloudpickle  # noqa: E402
import torch  # noqa: E402
from layout_runs import largest_difference  # noqa: E402
from mixture_runs import MixtureRun  # noqa: E402
from stage_faults import BROKEN, SAVED, STEPS, TIMEOUTS, Found, before, kill  # noqa: E402
from torch import Tensor  # noqa: E402

from shared.moe.layer import mixture_layers  # noqa: E402
from shared.parallel.comm.communicator import CommunicationError, Communicator, SingleRankCommunicator  # noqa: E402
from shared.parallel.comm.threads import run_threads  # noqa: E402
from shared.parallel.config import parse_layout  # noqa: E402
from shared.parallel.health import heartbeat  # noqa: E402
from shared.parallel.processes import launch  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CALLS = {"forward": 5, "backward": 12}  # of a step's all-to-alls: rows to the second layer's experts, and gradients on their way
MOMENTS = ("before", "in", "after")
LATE = 3.0  # seconds, fifteen heartbeats


@dataclass(frozen=True)
class Fault:
    """layout: of the run. rank: to which it happens. what: killed, late, asleep, fewer micro-batches, or fewer evaluation batches. place,
    moment: of the exchange. resumed: the layout that continues."""

    layout: str
    rank: int
    what: str = "killed"
    place: str = "forward"
    moment: str = "in"
    resumed: str = "dp2_ep2"


def broken(world: Communicator, fault: Fault, folder: Path) -> dict[str, Tensor]:
    """The run until the fault ends it. Ranks note why they end: by an exception, or by the watchdog, where an operation does not return."""

    def note(reason: object) -> None:
        (folder / f"told-{world.rank}").write_text(f"{time.time()} {reason}")

    heartbeat.end_process = before(note, heartbeat.end_process)
    run = MixtureRun(world, parse_layout(fault.layout))
    try:
        for step in range(1, STEPS + 1):
            if step == BROKEN and world.rank == fault.rank:
                happen(run, fault, folder)
            run.train(1)
            if step == BROKEN and fault.what == "fewer evaluation batches":
                evaluate(run, 2 - (world.rank == fault.rank))
            if step % SAVED == 0:
                run.save(folder / "checkpoints", asynchronous=False)
    except CommunicationError as error:
        note(error)
        raise
    return run.weights()


def evaluate(run: MixtureRun, count: int) -> None:
    run.plain.eval()
    with torch.no_grad():
        for number in range(count):
            run.parallel.model(run.batches(0, number, run.config)["input_ids"])
    run.plain.train()


def happen(run: MixtureRun, fault: Fault, folder: Path) -> None:
    """Prepare what happens to this rank in the coming step."""
    if fault.what == "fewer micro-batches":
        run.microbatches -= 1
    if fault.what.startswith("fewer"):
        (folder / "killed").write_text(str(time.time()))
        return
    ends = {"killed": lambda: kill(folder), "late": lambda: time.sleep(LATE), "asleep": lambda: sleep(folder)}[fault.what]
    group = mixture_layers(run.plain)[0].experts.forward.__self__.group
    group.all_to_all = around(CALLS[fault.place], fault.moment, ends, group.all_to_all)


def sleep(folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    time.sleep(10**6)


def around(number: int, moment: str, end: Callable[[], None], exchange: Callable) -> Callable:
    """An exchange in whose call of this number something happens: before it, after it has begun, or after it is over."""

    def counted(received: Sequence[Tensor], sent: Sequence[Tensor], asynchronous: bool = False) -> Any:
        nonlocal number
        number -= 1
        if number:
            return exchange(received, sent, asynchronous=asynchronous)
        if moment == "before":
            end()
        work = exchange(received, sent, asynchronous=True)
        if moment == "in":
            end()
        work.wait()
        if moment == "after":
            end()
        return work

    return counted


def trained(layout: str, folder: Path | None = None) -> tuple[list[int], dict[str, Tensor]]:
    """The steps from which ranks begin, and the weights after the last one; from checkpoints, where a folder is given. More than two
    ranks are processes, as in the run that breaks: threads add up more than two numbers in another order."""
    ranks = parse_layout(layout).ranks
    if ranks > 2:
        found = launch.run_processes(finish, ranks, layout, folder, timeout=300, timeouts=TIMEOUTS)
    else:
        found = run_threads(finish, 2, layout, folder) if ranks == 2 else [finish(SingleRankCommunicator(), layout, folder)]
    return [step for step, _ in found], {name: tensor for _, weights in found for name, tensor in weights.items()}


def finish(world: Communicator, layout: str, folder: Path | None) -> tuple[int, dict[str, Tensor]]:
    run = MixtureRun(world, parse_layout(layout), seed=9 if folder else 0)
    first = run.restore(folder).step if folder else 0
    return first, run.train(STEPS - first).weights()


def follow(fault: Fault, folder: Path) -> Found:
    """Break a run, then continue it on threads. A run that nothing ends is compared as it is, from step 0."""
    timeouts = replace(TIMEOUTS, heartbeat_timeout=4.0, collective_timeout=5.0) if fault.what == "asleep" else TIMEOUTS
    error, ended = "", []
    with patch.object(launch, "GRACE", 60.0):  # the others can say what they find
        try:
            ended = launch.run_processes(broken, parse_layout(fault.layout).ranks, fault, folder, timeout=300, timeouts=timeouts)
        except CommunicationError as raised:
            error = str(raised).splitlines()[0].rstrip(":")
    expected = trained(fault.layout)[1]
    if ended:
        weights, steps = {name: tensor for each in ended for name, tensor in each.items()}, [0]
    else:
        steps, weights = trained(fault.resumed, folder / "checkpoints")
    at = float((folder / "killed").read_text()) if (folder / "killed").exists() else time.time()
    noted = {int(path.name.split("-")[1]): path.read_text().split(" ", 1) for path in folder.glob("told-*")}
    told = {rank: (float(when) - at, sentence) for rank, (when, sentence) in sorted(noted.items())}
    same = weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    return Found(error, told, steps[0], 0.0 if same else largest_difference(weights, expected))


KILLED = [
    *(Fault("dp2_ep2", 1, place=place, moment=moment) for place in CALLS for moment in MOMENTS),
    Fault("dp2_ep2", 0, place="backward", resumed="one"), Fault("dp4_ep2", 2, resumed="dp4_ep2"),
    Fault("dp4_ep4", 3, place="backward", moment="before", resumed="dp2_ep2"), Fault("fsdp2_ep2", 1, moment="after", resumed="fsdp2_ep2"),
    Fault("dp4_ep2_zero1", 1, place="backward", resumed="fsdp2_ep2"), Fault("pp2_dp2_ep2", 3, resumed="pp2_dp2_ep2"),
]  # fmt: skip
OTHERS = [
    Fault("dp2_ep2", 1, "late"), Fault("dp2_ep2", 0, "late", place="backward"), Fault("dp2_ep2", 1, "asleep", moment="before"),
    Fault("dp2_ep2", 1, "fewer micro-batches"), Fault("dp4_ep2", 2, "fewer micro-batches", resumed="dp4_ep2"),
    Fault("dp2_ep2", 0, "fewer evaluation batches"),
]  # fmt: skip


def table(faults: Sequence[Fault]) -> Iterator[str]:
    yield "| layout | rank | what | exchange | the command | other ranks | resumed on | from step | largest difference in weights |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            found = follow(fault, Path(folder))
        told = {rank: each for rank, each in found.told.items() if rank != fault.rank}
        first = min(told.values(), default=None)
        said = f"{len(told)}, the first after {first[0]:.1f} s: {first[1].splitlines()[0]}" if first else "none ended"
        where = "" if fault.what.startswith("fewer") else f"{fault.moment} one {fault.place}"
        resumed = f"{fault.resumed} | {found.step}" if found.error else "not broken |"
        yield (
            f"| {fault.layout} | {fault.rank} | {fault.what} | {where} | {found.error or 'ends well'} | {said} | {resumed} "
            f"| {found.difference:.0e} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for line in chain(table(KILLED), [""], table(OTHERS)):
        print(line, flush=True)
