"""Chapter 06. Ranks as threads of one process: collectives for notebooks, checks and tests, with deadlocks found at once.

N ranks run the same function at the same time and share a `ThreadWorld`. A rank that starts an operation leaves copies of its tensors
there; waiting for the operation reads the copies of all ranks, so a result has the same bits whatever the order of arrival. In a deadlock
an error is raised at once, which says which rank waits in which operation.

    results = run_threads(lambda world: world.gather_objects(world.rank), 4)

Left out on purpose: speed. Python runs one thread at a time outside tensor operations; to time a step, start processes.
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
    Finish,
    RankStopped,
    Reduction,
    SingleRankCommunicator,
    dtype_name,
    require_finished,
)
from shared.parallel.comm.deadlock import HeartbeatMessage, deadlocked_ranks, describe_deadlock, find_mismatch, mismatch_of
from shared.parallel.comm.trace import CommTrace, TraceEntry

Result = TypeVar("Result")


@dataclass
class Rendezvous:
    """One collective of one group: the point where the threads exchange their tensors.

    calls: rank -> its operation. inputs: rank -> its tensors. readers: how many ranks have read their result.
    """

    calls: dict[int, TraceEntry] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)
    readers: int = 0


@dataclass
class Mailbox:
    """Messages from one rank to another, first in, first out: the n-th send goes to the n-th receive."""

    messages: dict[int, Tensor] = field(default_factory=dict)  # number -> what was sent and is not yet received
    sends: int = 0
    receives: int = 0


@dataclass
class ThreadWorld:
    """The state that the threads of one world share. Every access holds the condition `changed`.

    traces: of all ranks. waiting: rank -> whether the operation that it waits for can complete.
    """

    traces: list[CommTrace]
    changed: threading.Condition = field(default_factory=threading.Condition)
    rendezvous: dict[tuple, Rendezvous] = field(default_factory=dict)  # (split, members, number) -> rendezvous
    mailboxes: dict[tuple, Mailbox] = field(default_factory=dict)  # (split, from, to) -> mailbox
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    failed: dict[int, BaseException] = field(default_factory=dict)
    problem: CommunicationError | None = None

    def wait_until(self, rank: int, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`; the caller holds `changed`.

        Raises:
            CommunicationError: a deadlock, a mismatch, or another rank failed.
        """
        self.waiting[rank] = ready
        while self.problem is None and not ready():
            self.check_for_deadlock()
            if self.problem is None:
                self.changed.wait()
        del self.waiting[rank]
        self.raise_if_failed()

    def check_for_deadlock(self) -> None:
        """Fail where every rank waits or has ended and none can continue. The cause is a rank that failed, or calls that differ, or else a
        deadlock. It is checked only once no rank runs, so the message does not depend on which thread was faster."""
        running = len(self.traces) - len(self.waiting) - len(self.finished)
        if running or not self.waiting or any(ready() for ready in self.waiting.values()):
            return
        if self.failed:
            rank, error = min(self.failed.items())
            return self.fail(RankStopped(f"rank {rank} stopped with {type(error).__name__}: {error}"))
        ended = dict.fromkeys(self.finished, "has finished")
        messages = {rank: HeartbeatMessage.of(0, trace, ended=ended.get(rank, "")) for rank, trace in enumerate(self.traces)}
        self.fail(CommunicationError(find_mismatch(messages) or describe_deadlock(messages, deadlocked_ranks(messages))))

    def fail(self, problem: CommunicationError) -> None:
        """Stop every rank; the caller holds `changed`. The first problem is the one that is raised."""
        self.problem = self.problem or problem
        self.changed.notify_all()

    def raise_if_failed(self) -> None:
        if self.problem is not None:
            raise type(self.problem)(*self.problem.args)  # one for each thread: raising writes into an exception


class ThreadCommunicator(Communicator):
    """One thread's end of a process group."""

    def __init__(
        self, thread_world: ThreadWorld, members: Sequence[int], rank: int, axis: str, trace: CommTrace, split_number: int = 0
    ):
        super().__init__(members, rank, axis, trace, split_number)
        self.thread_world = thread_world

    def exchange(self, own: Any, finish: Callable[[list[Any]], Any]) -> Finish:
        """Start the collective that was recorded last, with the input `own`; it completes by `finish` with the inputs of all ranks, in rank
        order."""
        key, me, call = (self.split_number, self.members, self.number), self.members[self.rank], self.trace.last
        with self.thread_world.changed:
            self.thread_world.raise_if_failed()
            rendezvous = self.thread_world.rendezvous.setdefault(key, Rendezvous())
            rendezvous.calls[me], rendezvous.inputs[self.rank] = call, own
            self.thread_world.changed.notify_all()

        def wait() -> None:
            with self.thread_world.changed:
                self.thread_world.wait_until(me, lambda: len(rendezvous.inputs) == self.size)
                if problem := mismatch_of(rendezvous.calls):
                    raise CommunicationError(problem)
                rendezvous.readers += 1
                if rendezvous.readers == self.size:
                    self.thread_world.rendezvous.pop(key, None)
            finish([rendezvous.inputs[rank] for rank in range(self.size)])

        return wait

    def mailbox(self, source: int, to: int) -> Mailbox:
        return self.thread_world.mailboxes.setdefault((self.split_number, self.members[source], self.members[to]), Mailbox())

    def _gather_texts(self, text: str) -> list[str]:
        found: list[str] = []
        self.exchange(text, found.extend)()
        return found

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        self.exchange(None, lambda all: None)()
        return ThreadCommunicator(self.thread_world, mine, mine.index(self.members[self.rank]), axis, self.trace, self.splits)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Finish:
        return self.exchange(tensor.clone(), lambda all: tensor.copy_(reduce_in_rank_order(all, op)))

    def _all_gather(self, whole: Tensor, part: Tensor) -> Finish:
        return self.exchange(part.clone(), lambda all: torch.cat([each.flatten() for each in all], out=whole.view(-1)))

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        def finish(all: list[Tensor]) -> None:
            total = reduce_in_rank_order([each.view(self.size, -1)[self.rank] for each in all])
            if whole.is_floating_point():
                whole.fill_(torch.nan)  # undefined in other worlds: a caller that reads it must notice
            part.view(-1).copy_(total)

        return self.exchange(whole.clone(), finish)

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        bring = tensor.clone() if self.rank == root else None
        return self.exchange(bring, lambda all: tensor.copy_(all[root]))

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Finish:
        def finish(all: list[list[Tensor]]) -> None:
            for source, place, theirs in zip(self.members, received, all, strict=True):
                self.require_same("all_to_all", source, place, theirs[self.rank])
                place.copy_(theirs[self.rank].view_as(place))

        return self.exchange([tensor.clone() for tensor in sent], finish)

    def _send(self, tensor: Tensor, to: int) -> Finish:
        with self.thread_world.changed:
            mailbox = self.mailbox(self.rank, to)
            mailbox.sends += 1
            number = mailbox.sends
            mailbox.messages[number] = tensor.clone()
            self.thread_world.changed.notify_all()
        return self.deferred(lambda: mailbox.receives >= number)

    def _receive(self, tensor: Tensor, source: int) -> Finish:
        with self.thread_world.changed:
            mailbox = self.mailbox(source, self.rank)
            mailbox.receives += 1
            number = mailbox.receives
            self.thread_world.changed.notify_all()

        def read() -> None:
            message = mailbox.messages.pop(number)
            self.require_same("receive", self.members[source], tensor, message)
            tensor.copy_(message.view_as(tensor))

        return self.deferred(lambda: number in mailbox.messages, read)

    def deferred(self, ready: Callable[[], bool], finish: Callable[[], None] = lambda: None) -> Finish:
        """Wait until `ready()`, and then call `finish`."""

        def wait() -> None:
            with self.thread_world.changed:
                self.thread_world.wait_until(self.members[self.rank], ready)
                finish()

        return wait

    def require_same(self, operation: str, source: int, expected: Tensor, message: Tensor) -> None:
        if expected.numel() != message.numel() or expected.dtype != message.dtype:
            raise CommunicationError(
                f"mismatch: in {operation}, rank {self.members[self.rank]} expects {expected.numel()} numbers of {dtype_name(expected)} "
                f"from rank {source}, which sends {message.numel()} of {dtype_name(message)}"
            )

    def _barrier(self) -> Finish:
        return self.exchange(None, lambda all: None)


def run_threads(function: Callable[..., Result], ranks: int, *arguments: Any) -> list[Result]:
    """Run `function(world, *arguments)` on each of `ranks` threads, and return the results in rank order.

    `world` is the rank's `Communicator`. All threads share torch's default random generator and draw from it in any order: give each rank
    a `torch.Generator` of its own.

    Raises:
        CommunicationError: the ranks deadlock, make calls that do not match, or end with work that they never waited for.
        Exception: what the first rank that failed raised, with a note that says which rank it was.
    """
    thread_world = ThreadWorld([CommTrace() for _ in range(ranks)])
    results: list[Any] = [None] * ranks
    failures: dict[int, BaseException] = {}
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        problem = None
        try:
            trace = thread_world.traces[rank]
            world = SingleRankCommunicator() if ranks == 1 else ThreadCommunicator(thread_world, range(ranks), rank, "world", trace)
            with torch.set_grad_enabled(grad_enabled):
                results[rank] = function(world, *arguments)
            require_finished(world)
        except BaseException as error:
            failures[rank], problem = error, error
        with thread_world.changed:
            thread_world.finished.add(rank)
            if problem is not None:
                thread_world.failed[rank] = problem
            if thread_world.problem is None:
                thread_world.check_for_deadlock()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        with thread_world.changed:
            thread_world.fail(RankStopped("interrupted"))
        raise
    raise_first(failures, ranks)
    return results


def reduce_in_rank_order(tensors: Sequence[Tensor], op: Reduction = "sum") -> Tensor:
    """Reduce the ranks' tensors by sum (or max, min) in rank order, so that all ranks get the same bits."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        combine(total, tensor, out=total)
    return total


def raise_first(failures: dict[int, BaseException], ranks: int) -> None:
    """Raise the error of the first rank that failed by itself, if any did."""
    causes = [(rank, error) for rank, error in sorted(failures.items()) if not isinstance(error, RankStopped)]
    if causes:
        rank, error = causes[0]
        if not isinstance(error, CommunicationError):
            error.add_note(f"on rank {rank} of {ranks}")
        raise error
