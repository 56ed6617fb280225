"""A dry run: one process plays rank 0 of many, and what it computes and communicates is recorded as a list of actions.

Its process group is fake: operations take no time and carry nothing, so the loss means nothing, but shapes and the order of operations are
right. Chapter 06's `simulation.py` replays such lists over a link.

Left out on purpose: sends between two ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.parallel.comm.communicator import Communicator, Finish, Reduction
from shared.parallel.comm.trace import CommTrace, Work


@dataclass(frozen=True)
class Compute:
    """seconds of computing. name: of what, such as "forward"."""

    seconds: float
    name: str = ""


@dataclass(frozen=True)
class Begin:
    """Begin an operation of all `ranks`. bytes: of the whole tensor, as the trace counts."""

    operation: str
    bytes: int
    ranks: int


@dataclass(frozen=True)
class Wait:
    """Wait for an operation: the `number`-th that this rank has begun, from 0."""

    number: int


Action = Compute | Begin | Wait


class Recorder:
    """The actions recorded so far. clock: in seconds; it is stopped while an operation is recorded."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.actions, self.begun = clock, list[Action](), 0
        self.since = clock()

    def record_compute(self, name: str) -> None:
        """Compute since the last action."""
        seconds = self.clock() - self.since
        if seconds > 0:
            self.actions.append(Compute(seconds, name))
        self.since = self.clock()

    def record(self, action: Action) -> None:
        self.actions.append(action)
        self.since = self.clock()


class FakeGroup(Communicator):
    """A fake process group: rank 0 of a group whose other ranks do not exist. `dry_run` makes the world."""

    def __init__(self, members: Sequence[int], axis: str, trace: CommTrace, recorder: Recorder, split_number: int = 0):
        super().__init__(members, members.index(0), axis, trace, split_number)
        self.recorder = recorder

    def take_actions(self) -> list[Action]:
        """What this rank did since the world was made, or since the last call."""
        self.recorder.record_compute(self.trace.phase)
        actions, self.recorder.actions, self.recorder.begun = self.recorder.actions, [], 0
        return actions

    def dispatch(
        self, operation: str, payload: Tensor | int, start: Callable[[], Finish], asynchronous: bool, peer: int | None = None,
        is_traffic: bool = True, choice: str = "",
    ) -> Work:  # fmt: skip
        if peer is not None:
            raise ValueError(f"{operation}: a dry run has no other rank to send to or to receive from. Run it in threads.")
        if not is_traffic:
            return super().dispatch(operation, payload, start, asynchronous, is_traffic=False, choice=choice)
        self.recorder.record_compute(self.trace.phase)
        work = RecordedWork(super().dispatch(operation, payload, start, asynchronous=True, choice=choice), self.recorder, self.trace)
        self.recorder.record(Begin(operation, self.trace.entries[-1].bytes, self.size))
        if not asynchronous:
            work.wait()
        return work

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Finish:
        return None

    def _all_gather(self, whole: Tensor, part: Tensor) -> Finish:
        whole.view(self.size, -1).copy_(part.flatten().expand(self.size, -1).clone())
        return None

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        part.view(-1).copy_(whole.view(self.size, -1)[self.rank])
        return None

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        return None

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Finish:
        """Every other rank sends what this one sends to itself, where that has the size that is expected."""
        own = sent[self.rank]
        for tensor in received:
            tensor.copy_(own) if own.shape == tensor.shape else tensor.zero_()
        return None

    def _send(self, tensor: Tensor, to: int) -> Finish:
        return None

    def _receive(self, tensor: Tensor, source: int) -> Finish:
        return None

    def _barrier(self) -> Finish:
        return None

    def _gather_texts(self, text: str) -> list[str]:
        return [text] * self.size

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        return FakeGroup(mine, axis, self.trace, self.recorder, self.splits)


class RecordedWork:
    """A handle that records when it is waited for."""

    def __init__(self, work: Work, recorder: Recorder, trace: CommTrace):
        self.work, self.recorder, self.trace = work, recorder, trace
        self.number: int | None = recorder.begun
        recorder.begun += 1

    def wait(self) -> None:
        if self.number is not None:
            self.recorder.record_compute(self.trace.phase)
            self.work.wait()
            self.recorder.record(Wait(self.number))
            self.number = None


def dry_run(ranks: int, clock: Callable[[], float] = time.perf_counter) -> FakeGroup:
    """Start a dry run: the world of rank 0 of `ranks`, without the others.

    Args:
        clock: returns seconds, and need not be a clock: with

                with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                    world = dry_run(4, clock=lambda: counter.get_total_flops() / 71e12)

            computing takes as long as its matrix products do at 71 TFLOP/s, the same on every machine.
    """
    return FakeGroup(range(ranks), "world", CommTrace(), Recorder(clock))
