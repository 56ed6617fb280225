"""Chapter 06. Collective operations of a process group: all-reduce, all-gather, reduce-scatter, ... in threads and in processes.

A rank is one of several processes, or threads, that train one model together. A `Communicator` is one rank's end of a group of ranks: the
whole world, or one axis of the mesh. Every rank of the group must make the same calls in the same order; if a rank does not, the error
names it. Every call is recorded in the rank's `CommTrace`.

Left out on purpose: how bytes travel. `shared.parallel.comm.threads` copies them within one process, and
`shared.parallel.processes.torchrun` hands them to gloo or NCCL.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from shared.course.errors import CourseError
from shared.parallel.comm.trace import CommTrace, TraceEntry, Work

Reduction = Literal["sum", "max", "min"]
Finish = Callable[[], Any] | None  # completes an operation that was started; None where it is complete


class CommunicationError(CourseError):
    """A deadlock, calls that do not match, or a rank that is gone; the message says which rank waits in which operation."""


class RankStopped(CommunicationError):
    """This rank was stopped because another one failed: the cause is there."""


class Communicator:
    """One rank's end of a process group.

    Every operation works in place on contiguous tensors, and autograd does not see it. With `asynchronous=True` a call returns before the
    operation is complete: always call `wait` on the work that it returns. Otherwise the operation is complete when the call returns.
    In a group of one rank every operation is the identity, and nothing is sent or recorded.

    Attributes:
        rank: this rank's number within the group, from 0.
        size: the number of ranks in the group.
        members: their global ranks, in order; `members[rank]` is this one.
        axis: the group's name in the trace: world, dp, fsdp, ...
        trace: the calls and bytes of this rank, in all its groups.
        split_number: which split of the world made the group; 0 is the world.
        number: how many collectives of the group this rank has started.
    """

    def __init__(self, members: Sequence[int], rank: int, axis: str, trace: CommTrace, split_number: int = 0):
        self.members, self.rank, self.size = tuple(members), rank, len(members)
        self.axis, self.trace = axis, trace
        self.split_number, self.splits, self.number = split_number, 0, 0

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", asynchronous: bool = False) -> Work:
        """Replace every rank's `tensor` by the sum (or max, min) over the ranks, with the same bits on all of them."""
        tensor = raw_buffer(tensor)
        return self.dispatch("all_reduce", tensor, lambda: self._all_reduce(tensor, op), asynchronous, choice=f"({op})")

    def all_gather(self, whole: Tensor, part: Tensor, asynchronous: bool = False) -> Work:
        """Concatenate the ranks' `part` [n] in `whole` [size * n]. `part` may be its own slice of `whole`."""
        whole, part = raw_buffer(whole), raw_buffer(part)
        require_shards("all_gather", whole, part, self.size)
        if self.size == 1:
            return copied(part, whole)
        return self.dispatch("all_gather", whole, lambda: self._all_gather(whole, part), asynchronous)

    def reduce_scatter(self, part: Tensor, whole: Tensor, asynchronous: bool = False) -> Work:
        """Write this rank's slice of the sum over the ranks of `whole` [size * n] to `part` [n]. `part` may be its own slice of `whole`,
        the rest of which is undefined afterwards."""
        whole, part = raw_buffer(whole), raw_buffer(part)
        require_shards("reduce_scatter", whole, part, self.size)
        if self.size == 1:
            return copied(whole, part)
        return self.dispatch("reduce_scatter", whole, lambda: self._reduce_scatter(part, whole), asynchronous)

    def broadcast(self, tensor: Tensor, root: int, asynchronous: bool = False) -> Work:
        """Copy the `tensor` of `root`, a rank of this group, to every rank."""
        tensor = raw_buffer(tensor)
        self.require_member("broadcast", root)
        return self.dispatch("broadcast", tensor, lambda: self._broadcast(tensor, root), asynchronous, choice=f"(from {root})")

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], asynchronous: bool = False) -> Work:
        """Copy rank r's `sent[s]` to rank s's `received[r]`. All tensors have one dtype; sizes may differ and may be 0."""
        if not len(received) == len(sent) == self.size:
            raise ValueError(
                f"all_to_all: give {self.size} tensors to send and {self.size} to receive, not {len(sent)} and {len(received)}."
            )
        if len({tensor.dtype for tensor in (*received, *sent)}) > 1:
            raise ValueError("all_to_all: the tensors have several dtypes, and are sent as one tensor: convert them to one dtype.")
        received, sent = [raw_buffer(tensor) for tensor in received], [raw_buffer(tensor) for tensor in sent]
        if self.size == 1:
            return copied(sent[0], received[0])
        start, sent_bytes = lambda: self._all_to_all(received, sent), sum(tensor.numel() * tensor.element_size() for tensor in sent)
        return self.dispatch("all_to_all", sent_bytes, start, asynchronous, choice=f" of {dtype_name(sent[0])}")

    def send(self, tensor: Tensor, to: int, asynchronous: bool = False) -> Work:
        """Send `tensor` to a rank of this group. A send is complete once that rank has called `receive`, so two ranks that both send first
        and wait for it deadlock: send asynchronously."""
        tensor = raw_buffer(tensor)
        self.require_member("send", to)
        return self.dispatch("send", tensor, lambda: self._send(tensor, to), asynchronous, peer=to)

    def receive(self, tensor: Tensor, source: int, asynchronous: bool = False) -> Work:
        """Receive `tensor` from a rank of this group. Between two ranks, tensors arrive in the order in which they were sent."""
        tensor = raw_buffer(tensor)
        self.require_member("receive", source)
        return self.dispatch("receive", tensor, lambda: self._receive(tensor, source), asynchronous, peer=source)

    def barrier(self) -> None:
        """Wait until every rank of the group has called it."""
        self.dispatch("barrier", 0, self._barrier, asynchronous=False)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather every rank's `value`, in rank order, on every rank. Values are small, travel as JSON, and are no traffic in the trace; a
        training step does not use this."""
        text, texts = json.dumps(value), []
        start = lambda: lambda: texts.extend(self._gather_texts(text))  # noqa: E731
        self.dispatch("gather_objects", len(text), start, asynchronous=False, is_traffic=False)
        return [json.loads(each) for each in texts or [text]]

    def split(self, axis: str, groups: Sequence[Sequence[int]]) -> "Communicator":
        """Split the world into groups, and return the one of this rank. Every rank of the world calls it with the same `groups`, which
        together hold each global rank once."""
        groups = [tuple(group) for group in groups]
        if self.split_number or sorted(rank for group in groups for rank in group) != sorted(self.members):
            raise ValueError(f"split into {axis!r}: {groups} must hold each rank of the world once, and only the world is split.")
        self.splits += 1
        mine = next(group for group in groups if self.members[self.rank] in group)
        made: list[Communicator] = []
        start = lambda: lambda: made.append(self._split(axis, groups, mine))  # noqa: E731
        self.dispatch("split", 0, start, asynchronous=False, is_traffic=False, choice=f" into {axis} {groups}")
        return SingleRankCommunicator(axis, mine[0], self.trace, self.splits) if len(mine) == 1 else made[0]

    def require_member(self, operation: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{operation}: there is no rank {rank} in the group {self.axis!r} of {self.size}: ranks count within the group."
            )
        if operation != "broadcast" and rank == self.rank:
            raise ValueError(f"{operation}: rank {rank} of {self.axis!r} is this rank itself: copy the tensor.")

    def dispatch(
        self,
        operation: str,
        payload: Tensor | int,
        start: Callable[[], Finish],
        asynchronous: bool,
        peer: int | None = None,
        is_traffic: bool = True,
        choice: str = "",
    ) -> Work:
        """Record an operation in the trace, and start it. It is recorded first, so that one that never returns can be named.

        Args:
            payload: the full tensor, or its bytes.
            start: starts the operation and returns what completes it.
            peer: the other rank of a send or receive; None for a collective, which is numbered within the group.
            is_traffic: whether the trace counts and lists it.
            choice: what all ranks must pass alike besides a tensor of this dtype and shape.
        """
        if self.size == 1:
            return Work()
        self.number += peer is None
        if isinstance(payload, int):
            entry = self.entry(operation, payload, peer, choice)
        else:
            about = f"{choice} of {dtype_name(payload)} {tuple(payload.shape)}"
            entry = self.entry(operation, payload.numel() * payload.element_size(), peer, about)
        self.trace.record(entry, is_traffic)
        finish = start()
        work = Work(lambda: self.trace.wait(entry, finish))
        if not asynchronous:
            work.wait()
        return work

    def entry(self, operation: str, size_in_bytes: int, peer: int | None = None, arguments: str = "") -> TraceEntry:
        """An operation of this group, for the trace. peer: the other rank of a send or receive."""
        entry = TraceEntry(operation, self.axis, size_in_bytes, self.size, number=self.number, split_number=self.split_number)
        entry.ranks, entry.arguments = self.members, arguments
        if peer is not None:
            me, entry.peer = self.members[self.rank], self.members[peer]
            entry.ranks = (me, entry.peer) if operation == "send" else (entry.peer, me)
        return entry

    # How bytes travel: each starts an operation of several ranks, and returns what completes it.

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Finish:
        raise NotImplementedError

    def _all_gather(self, whole: Tensor, part: Tensor) -> Finish:
        raise NotImplementedError

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Finish:
        raise NotImplementedError

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        raise NotImplementedError

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Finish:
        raise NotImplementedError

    def _send(self, tensor: Tensor, to: int) -> Finish:
        raise NotImplementedError

    def _receive(self, tensor: Tensor, source: int) -> Finish:
        raise NotImplementedError

    def _barrier(self) -> Finish:
        raise NotImplementedError

    def _gather_texts(self, text: str) -> list[str]:
        raise NotImplementedError

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> "Communicator":
        """Return the group `mine`, one of `groups`. Where `mine` is this rank alone, it is called as well and its result is not used."""
        raise NotImplementedError


class SingleRankCommunicator(Communicator):
    """The process group of a single rank, a world size of 1."""

    def __init__(self, axis: str = "world", member: int = 0, trace: CommTrace | None = None, split_number: int = 0):
        super().__init__((member,), 0, axis, trace or CommTrace(), split_number)


def copied(source: Tensor, to: Tensor) -> Work:
    """What a group of one rank does with two tensors."""
    if source.data_ptr() != to.data_ptr():
        to.copy_(source.view_as(to))  # one of them may have the ranks as its first dimension
    return Work()


def require_shards(operation: str, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.dtype != part.dtype:
        raise ValueError(f"{operation}: the full tensor is {dtype_name(whole)} and a shard {dtype_name(part)}: they must have one dtype.")
    if whole.numel() != part.numel() * size:
        numbers = f"the full tensor has {whole.numel()} elements and a shard {part.numel()}"
        raise ValueError(f"{operation}: {numbers}: with {size} ranks it must be {size} times as many. Pad the last shard.")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def raw_buffer(tensor: Tensor) -> Tensor:
    """The tensor's memory without autograd: a collective may write to it, and autograd neither records that nor counts it as a change.

    Raises:
        ValueError: the tensor is not contiguous, or its storage was freed.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} is not contiguous, so it cannot be sent as one buffer: call .contiguous()."
        )
    needed, available = (tensor.storage_offset() + tensor.numel()) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if tensor.numel() and available < needed:
        raise ValueError(f"A tensor needs {needed} bytes and its storage has {available}: allocate it before a collective uses it.")
    return tensor.data


def require_finished(world: Communicator) -> None:
    """Refuse to end a rank with pending asynchronous work: its result may have been read too early."""
    entry = world.trace.unfinished()
    if entry is not None:
        place = f"rank {world.rank} ended without waiting for {entry.description}"
        raise CommunicationError(f"{place}: call wait() on what the operation returned")
