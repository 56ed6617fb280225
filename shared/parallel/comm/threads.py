"""Chapter 06. Ranks as threads of one process: collectives for notebooks, checks and tests, with deadlocks found at once.

N ranks run the same function at the same time and share a `ThreadWorld`. A rank that starts an operation leaves copies of its tensors
there; waiting for the operation reads the copies of all ranks, so a result has the same bits whatever the order of arrival. The world knows
where each rank waits, so a deadlock raises an error at once, which says which rank waits in which operation.

    results = run_threads(lambda world: world.gather_objects(world.rank), 4)

Left out on purpose: speed. Python runs one thread at a time outside tensor operations; timings come from `shared.parallel.comm.processes`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from shared.parallel.comm.communicator import (
    CommunicationError,
    Communicator,
    SingleRankCommunicator,
    RankStopped,
    Reduction,
    DeferredWork,
    Work,
    dtype_name,
    flat_sum,
    require_finished,
)
from shared.parallel.comm.trace import CommTrace

Result = TypeVar("Result")


@dataclass
class Rendezvous:
    """One operation of one group, `place`.

    calls: rank -> the operation and what it is about, which must be the same for all. brought: rank -> its tensors. left: how many ranks
    have picked up their result.
    """

    place: str
    calls: dict[int, str] = field(default_factory=dict)
    brought: dict[int, Any] = field(default_factory=dict)
    left: int = 0

    def require_agreement(self) -> None:
        first, *others = sorted(self.calls.items())
        for rank, call in others:
            if call != first[1]:
                raise CommunicationError(f"mismatch: in {self.place}, rank {first[0]} calls {first[1]}; rank {rank} calls {call}")


@dataclass
class Channel:
    """What goes from one rank to another: the n-th that is sent is the n-th that is received."""

    mailbox: dict[int, Tensor] = field(default_factory=dict)  # number -> what was sent and is not yet picked up
    sent: int = 0
    asked: int = 0


@dataclass
class ThreadWorld:
    """Where the threads of one world meet. Everything in it is changed under `changed`."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    meetings: dict[tuple, Rendezvous] = field(default_factory=dict)  # (split, members, number) -> meeting
    channels: dict[tuple, Channel] = field(default_factory=dict)  # (split, from, to) -> channel
    waiting: dict[int, tuple[str, Callable[[], bool]]] = field(default_factory=dict)  # rank -> where, and whether it can go on
    finished: set[int] = field(default_factory=set)
    failed: dict[int, BaseException] = field(default_factory=dict)
    problem: CommunicationError | None = None

    def wait_until(self, rank: int, where: str, ready: Callable[[], bool]) -> None:
        """Wait in `where` until `ready()`; called with `changed` held.

        Raises:
            CommunicationError: it never will be, or another rank failed.
        """
        self.waiting[rank] = (where, ready)
        while self.problem is None and not ready():
            self.look_for_deadlock()
            if self.problem is None:
                self.changed.wait()
        del self.waiting[rank]
        self.raise_if_failed()

    def look_for_deadlock(self) -> None:
        """Where nobody is left who could change anything, stop those who wait, and say why: a rank that failed, calls that differ, or who
        waits where. Until then everybody goes on, so what is told does not depend on who was faster."""
        if len(self.waiting) + len(self.finished) < self.size or any(ready() for _, ready in self.waiting.values()) or not self.waiting:
            return
        if self.failed:
            rank, error = min(self.failed.items())
            return self.fail(RankStopped(f"rank {rank} stopped with {type(error).__name__}: {error}"))
        try:
            for meeting in self.meetings.values():
                meeting.require_agreement()
        except CommunicationError as mismatch:
            return self.fail(mismatch)
        places = {rank: f"waits in {where}" for rank, (where, _) in self.waiting.items()} | dict.fromkeys(self.finished, "has finished")
        self.fail(CommunicationError("deadlock: " + "; ".join(f"rank {rank} {places[rank]}" for rank in sorted(places))))

    def fail(self, problem: CommunicationError) -> None:
        """Stop every rank; called with `changed` held. The first problem is the one that is told."""
        self.problem = self.problem or problem
        self.changed.notify_all()

    def raise_if_failed(self) -> None:
        if self.problem is not None:
            raise type(self.problem)(*self.problem.args)  # one for each thread: raising writes into an exception


class ThreadCommunicator(Communicator):
    """One thread's end of a group."""

    def __init__(self, town: ThreadWorld, members: Sequence[int], rank: int, axis: str, trace: CommTrace, split_number: int = 0):
        super().__init__(members, rank, axis, trace, split_number)
        self.town = town

    def meet(self, operation: str, detail: str, bring: Any, finish: Callable[[list[Any]], Any]) -> Work:
        """Leave `bring` at the group's next meeting; waiting calls `finish` with what all ranks brought, in rank order."""
        key, me, place = (self.split_number, self.members, self.number), self.members[self.rank], f"#{self.number} of {self.axis}"
        with self.town.changed:
            self.town.raise_if_failed()
            meeting = self.town.meetings.setdefault(key, Rendezvous(f"operation {place}"))
            meeting.calls[me], meeting.brought[self.rank] = f"{operation}{detail}", bring
            self.town.changed.notify_all()

        def pick_up() -> None:
            with self.town.changed:
                self.town.wait_until(me, f"{operation} {place}", lambda: len(meeting.brought) == self.size)
                meeting.require_agreement()
                meeting.left += 1
                if meeting.left == self.size:
                    self.town.meetings.pop(key, None)
            finish([meeting.brought[rank] for rank in range(self.size)])

        return DeferredWork(pick_up)

    def channel(self, source: int, to: int) -> Channel:
        return self.town.channels.setdefault((self.split_number, self.members[source], self.members[to]), Channel())

    def _gather_texts(self, text: str) -> list[str]:
        found: list[str] = []
        self.meet("gather_objects", "", text, found.extend).wait()
        return found

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        self.meet("split", f" into {axis} {groups}", None, lambda all: None).wait()
        return ThreadCommunicator(self.town, mine, mine.index(self.members[self.rank]), axis, self.trace, self.splits)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self.meet(f"all_reduce({op})", shape_of(tensor), tensor.clone(), lambda all: tensor.copy_(flat_sum(all, op)))

    def _all_gather(self, whole: Tensor, part: Tensor) -> Work:
        finish = lambda all: torch.cat([each.flatten() for each in all], out=whole.view(-1))  # noqa: E731
        return self.meet("all_gather", shape_of(part), part.clone(), finish)

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        def finish(all: list[Tensor]) -> None:
            total = flat_sum([each.view(self.size, -1)[self.rank] for each in all])
            if whole.is_floating_point():
                whole.fill_(torch.nan)  # so that whoever reads it notices: in other worlds it holds something half done
            part.view(-1).copy_(total)

        return self.meet("reduce_scatter", shape_of(whole), whole.clone(), finish)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        bring = tensor.clone() if self.rank == root else None
        return self.meet(f"broadcast(from {root})", shape_of(tensor), bring, lambda all: tensor.copy_(all[root]))

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Work:
        def finish(all: list[list[Tensor]]) -> None:
            for source, place, theirs in zip(self.members, received, all, strict=True):
                self.require_same("all_to_all", source, place, theirs[self.rank])
                place.copy_(theirs[self.rank].view_as(place))

        return self.meet("all_to_all", f" of {dtype_name(sent[0])}", [tensor.clone() for tensor in sent], finish)

    def _send(self, tensor: Tensor, to: int) -> Work:
        with self.town.changed:
            channel = self.channel(self.rank, to)
            channel.sent += 1
            number = channel.sent
            channel.mailbox[number] = tensor.clone()
            self.town.changed.notify_all()
        return self.when(f"send to rank {self.members[to]}", lambda: channel.asked >= number)

    def _receive(self, tensor: Tensor, source: int) -> Work:
        with self.town.changed:
            channel = self.channel(source, self.rank)
            channel.asked += 1
            number = channel.asked
            self.town.changed.notify_all()

        def pick_up() -> None:
            letter = channel.mailbox.pop(number)
            self.require_same("receive", self.members[source], tensor, letter)
            tensor.copy_(letter.view_as(tensor))

        return self.when(f"receive from rank {self.members[source]}", lambda: number in channel.mailbox, pick_up)

    def when(self, where: str, ready: Callable[[], bool], finish: Callable[[], None] = lambda: None) -> Work:
        """Work that waits until it is `ready`, and then calls `finish`."""

        def wait() -> None:
            with self.town.changed:
                self.town.wait_until(self.members[self.rank], where, ready)
                finish()

        return DeferredWork(wait)

    def require_same(self, operation: str, source: int, place: Tensor, letter: Tensor) -> None:
        if place.numel() != letter.numel() or place.dtype != letter.dtype:
            raise CommunicationError(
                f"mismatch: in {operation}, rank {self.members[self.rank]} expects {place.numel()} numbers of {dtype_name(place)} from "
                f"rank {source}, which sends {letter.numel()} of {dtype_name(letter)}"
            )

    def _barrier(self) -> Work:
        return self.meet("barrier", "", None, lambda all: None)


def run_threads(function: Callable[..., Result], ranks: int, *arguments: Any) -> list[Result]:
    """Run `function(world, *arguments)` on each of `ranks` threads, and return the results in rank order.

    `world` is the rank's `Communicator`. Random numbers drawn without a generator of one's own come from one stream for all threads, in
    any order: give each rank its own `torch.Generator`.

    Raises:
        CommunicationError: the ranks wait for each other for ever, make calls that do not match, or end with work they never waited for.
        Exception: what the first rank that failed raised, with a note that says which rank it was.
    """
    town = ThreadWorld(ranks)
    results: list[Any] = [None] * ranks
    failures: dict[int, BaseException] = {}
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        problem = None
        try:
            world = SingleRankCommunicator() if ranks == 1 else ThreadCommunicator(town, range(ranks), rank, "world", CommTrace())
            with torch.set_grad_enabled(grad_enabled):
                results[rank] = function(world, *arguments)
            require_finished(world)
        except BaseException as error:
            failures[rank], problem = error, error
        with town.changed:
            town.finished.add(rank)
            if problem is not None:
                town.failed[rank] = problem
            if town.problem is None:
                town.look_for_deadlock()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        with town.changed:
            town.fail(RankStopped("interrupted"))
        raise
    raise_first(failures, ranks)
    return results


def raise_first(failures: dict[int, BaseException], ranks: int) -> None:
    """Raise what the first rank that failed by itself raised, where one did."""
    causes = [(rank, error) for rank, error in sorted(failures.items()) if not isinstance(error, RankStopped)]
    if causes:
        rank, error = causes[0]
        if not isinstance(error, CommunicationError):
            error.add_note(f"on rank {rank} of {ranks}")
        raise error


def shape_of(tensor: Tensor) -> str:
    return f" of {dtype_name(tensor)} {tuple(tensor.shape)}"
