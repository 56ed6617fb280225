"""Chapter 06. A rehearsal: one process goes through a rank's part in a world of many, and what it does is taken down, to be replayed.

    world = rehearse(4)
    ...                                              one step of any parallelism, on a mesh made of `world`
    replay([world.taken()] * 4, Link(latency=2e-5, bandwidth=1e10))

The code that runs is the real one, so the order of what it computes, begins and waits for is the real one too. Operations take no time
here and carry nothing: an all-gather hands out n copies of the rank's own part, so the loss means nothing, and the shapes are right.

Left out on purpose: sends and receives, whose partner would have to play along.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from shared.parallel.comm.communicator import Communicator, CompletedWork, Reduction, Work
from shared.parallel.comm.trace import CommTrace
from shared.parallel.planning.timeline import Action, Begin, Compute, Wait


class Script:
    """What was done so far. clock: seconds; it stands still while an operation is noted."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.actions, self.begun = clock, list[Action](), 0
        self.since = clock()

    def note_computing(self, name: str) -> None:
        """What was computed since the last event."""
        seconds = self.clock() - self.since
        if seconds > 0:
            self.actions.append(Compute(seconds, name))
        self.since = self.clock()

    def note(self, action: Action) -> None:
        self.actions.append(action)
        self.since = self.clock()


class Rehearsal(Communicator):
    """Rank 0's end of a group whose other ranks are not there. `rehearse` makes the world."""

    def __init__(self, members: Sequence[int], axis: str, trace: CommTrace, script: Script, split_number: int = 0):
        super().__init__(members, members.index(0), axis, trace, split_number)
        self.script = script

    def taken(self) -> list[Action]:
        """What was done since the world was made, or since this was called last."""
        self.script.note_computing(self.trace.phase)
        actions, self.script.actions, self.script.begun = self.script.actions, [], 0
        return actions

    def dispatch(
        self,
        operation: str,
        payload: Tensor | int,
        start: Callable[[], Work],
        asynchronous: bool,
        peer: int | None = None,
        is_traffic: bool = True,
    ) -> Work:
        if peer is not None:
            raise ValueError(f"{operation}: nobody is there to send to or to receive from in a rehearsal. Run it in threads.")
        if not is_traffic:
            return super().dispatch(operation, payload, start, asynchronous, is_traffic=False)
        self.script.note_computing(self.trace.phase)
        work = RehearsedWork(super().dispatch(operation, payload, start, asynchronous=True), self.script, self.trace)
        self.script.note(Begin(operation, self.trace.entries[-1].bytes, self.size))
        if not asynchronous:
            work.wait()
        return work

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return CompletedWork()

    def _all_gather(self, whole: Tensor, part: Tensor) -> Work:
        whole.view(self.size, -1).copy_(part.flatten().expand(self.size, -1).clone())
        return CompletedWork()

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        part.view(-1).copy_(whole.view(self.size, -1)[self.rank])
        return CompletedWork()

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return CompletedWork()

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Work:
        for place in received:
            place.zero_()
        return CompletedWork()

    def _send(self, tensor: Tensor, to: int) -> Work:
        return CompletedWork()

    def _receive(self, tensor: Tensor, source: int) -> Work:
        return CompletedWork()

    def _barrier(self) -> Work:
        return CompletedWork()

    def _gather_texts(self, text: str) -> list[str]:
        return [text] * self.size

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        return Rehearsal(mine, axis, self.trace, self.script, self.splits)


class RehearsedWork:
    """Work that takes down that it is waited for."""

    def __init__(self, work: Work, script: Script, trace: CommTrace):
        self.work, self.script, self.trace = work, script, trace
        self.number: int | None = script.begun
        script.begun += 1

    def wait(self) -> None:
        if self.number is not None:
            self.script.note_computing(self.trace.phase)
            self.work.wait()
            self.script.note(Wait(self.number))
            self.number = None


def rehearse(ranks: int, clock: Callable[[], float] = time.perf_counter) -> Rehearsal:
    """The world of rank 0 of `ranks`, alone.

    Args:
        clock: what time is read off, in seconds. It need not be a clock: with

                with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                    world = rehearse(4, clock=lambda: counter.get_total_flops() / 71e12)

            computing takes as long as its matrix products would at 71 TFLOP/s, the same on every machine.
    """
    return Rehearsal(range(ranks), "world", CommTrace(), Script(clock))
