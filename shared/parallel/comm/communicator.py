"""Chapter 06. What ranks say to each other: a handful of operations, the same in threads and in processes, each one recorded.

A rank is one of several processes, or threads, that train one model together. A `Communicator` is one rank's end of a group of ranks: the
whole world, or one axis of the mesh. Every rank of the group makes the same calls in the same order; whoever does not is named.

Left out on purpose: how bytes travel. `shared.parallel.comm.threads` copies them within one process, and
`shared.parallel.comm.processes` hands them to gloo or NCCL.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shared.course.errors import CourseError
from shared.parallel.comm.trace import CommTrace, TracedWork

Reduction = Literal["sum", "max", "min"]


class CommunicationError(CourseError):
    """Ranks that do not agree about what to do next, or one that is gone; the message says who waits where."""


class RankStopped(CommunicationError):
    """Another rank failed, so this one was told to stop. Not the cause."""


class Work(Protocol):
    """An operation under way. Its tensors must be left alone until `wait` has returned."""

    def wait(self) -> None: ...


class Communicator(ABC):
    """One rank's end of a group.

    Every operation works in place on contiguous tensors, unseen by autograd, and with `asynchronous=True` returns before it is done:
    call `wait` on what it returns, always. Without, it is done when the call returns.

    Attributes:
        rank: this rank's place in the group, from 0.
        size: how many ranks the group has.
        members: their global ranks, in order; `members[rank]` is this one.
        axis: what the group is called in the trace: world, dp, fsdp, ...
        trace: calls and bytes of this rank, over all its groups.
        split_number: which split of the world made the group; 0 is the world.
        number: how many operations of the whole group this rank has begun.
    """

    def __init__(self, members: Sequence[int], rank: int, axis: str, trace: CommTrace, split_number: int = 0):
        self.members, self.rank, self.size = tuple(members), rank, len(members)
        self.axis, self.trace = axis, trace
        self.split_number, self.splits, self.number = split_number, 0, 0

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", asynchronous: bool = False) -> Work:
        """Every rank's `tensor` becomes the sum (or max, min) over the ranks, the same bits on all of them."""
        tensor = plain(tensor)
        return self.dispatch("all_reduce", tensor, lambda: self._all_reduce(tensor, op), asynchronous)

    def all_gather(self, whole: Tensor, part: Tensor, asynchronous: bool = False) -> Work:
        """`whole` [size * n] becomes the ranks' parts [n], one after the other. `part` may be its own place in `whole`."""
        whole, part = plain(whole), plain(part)
        require_parts("all_gather", whole, part, self.size)
        return self.dispatch("all_gather", whole, lambda: self._all_gather(whole, part), asynchronous)

    def reduce_scatter(self, part: Tensor, whole: Tensor, asynchronous: bool = False) -> Work:
        """`part` [n] becomes this rank's share of the sum over the ranks of `whole` [size * n]. `part` may be its own place in `whole`,
        the rest of which holds nothing afterwards."""
        whole, part = plain(whole), plain(part)
        require_parts("reduce_scatter", whole, part, self.size)
        return self.dispatch("reduce_scatter", whole, lambda: self._reduce_scatter(part, whole), asynchronous)

    def broadcast(self, tensor: Tensor, root: int, asynchronous: bool = False) -> Work:
        """Every rank's `tensor` becomes that of `root`, a rank of this group."""
        tensor = plain(tensor)
        self.require_member("broadcast", root)
        return self.dispatch("broadcast", tensor, lambda: self._broadcast(tensor, root), asynchronous)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], asynchronous: bool = False) -> Work:
        """Rank r's `sent[s]` becomes rank s's `received[r]`, all of one dtype. Sizes may differ and may be 0."""
        if not len(received) == len(sent) == self.size:
            raise ValueError(
                f"all_to_all: give {self.size} tensors to send and {self.size} to receive, not {len(sent)} and {len(received)}."
            )
        if len({tensor.dtype for tensor in (*received, *sent)}) > 1:
            raise ValueError("all_to_all: the tensors have several dtypes, and travel as one: convert them to one dtype.")
        received, sent = [plain(tensor) for tensor in received], [plain(tensor) for tensor in sent]
        sent_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sent)
        return self.dispatch("all_to_all", sent_bytes, lambda: self._all_to_all(received, sent), asynchronous)

    def send(self, tensor: Tensor, to: int, asynchronous: bool = False) -> Work:
        """Give `tensor` to a rank of this group. It is done once that rank has called `receive`, so two ranks that both send first, and
        wait, wait for ever: send asynchronously."""
        tensor = plain(tensor)
        self.require_member("send", to)
        return self.dispatch("send", tensor, lambda: self._send(tensor, to), asynchronous, peer=to)

    def receive(self, tensor: Tensor, source: int, asynchronous: bool = False) -> Work:
        """`tensor` becomes what a rank of this group sends. Between two ranks, what is sent first is received first."""
        tensor = plain(tensor)
        self.require_member("receive", source)
        return self.dispatch("receive", tensor, lambda: self._receive(tensor, source), asynchronous, peer=source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.dispatch("barrier", 0, self._barrier, asynchronous=False)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank: small things that JSON can hold, as JSON gives them back. Not on the way of
        a step, and not in the trace's entries."""
        text, texts = json.dumps(value), []
        start = lambda: DeferredWork(lambda: texts.extend(self._gather_texts(text)))  # noqa: E731
        self.dispatch("gather_objects", len(text), start, asynchronous=False, is_traffic=False)
        return [json.loads(each) for each in texts]

    def split(self, axis: str, groups: Sequence[Sequence[int]]) -> "Communicator":
        """The group that holds this rank, of several that together hold each global rank once. Every rank of the world calls it, with
        the same groups."""
        groups = [tuple(group) for group in groups]
        if self.split_number or sorted(rank for group in groups for rank in group) != sorted(self.members):
            raise ValueError(f"split into {axis!r}: {groups} must hold each rank of the world once, and only the world is split.")
        self.splits += 1
        mine = next(group for group in groups if self.members[self.rank] in group)
        found: list[Communicator] = []
        start = lambda: DeferredWork(lambda: found.append(self._split(axis, groups, mine)))  # noqa: E731
        self.dispatch("split", 0, start, asynchronous=False, is_traffic=False)
        return SingleRankCommunicator(axis, mine[0], self.trace, self.splits) if len(mine) == 1 else found[0]

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
        start: Callable[[], Work],
        asynchronous: bool,
        peer: int | None = None,
        is_traffic: bool = True,
    ) -> Work:
        """Begin an operation, noted in the trace before it begins, so that one that never ends can be named. peer: the one other rank
        that it is about; without, it is an operation of the whole group, and numbered."""
        size = payload if isinstance(payload, int) else payload.numel() * payload.element_size()
        self.number += peer is None
        entry = self.trace.record(operation, self, size, peer, is_traffic)
        work = TracedWork(start(), entry, self.trace)
        if not asynchronous:
            work.wait()
        return work

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work: ...

    @abstractmethod
    def _all_gather(self, whole: Tensor, part: Tensor) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> Work: ...

    @abstractmethod
    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Work: ...

    @abstractmethod
    def _send(self, tensor: Tensor, to: int) -> Work: ...

    @abstractmethod
    def _receive(self, tensor: Tensor, source: int) -> Work: ...

    @abstractmethod
    def _barrier(self) -> Work: ...

    @abstractmethod
    def _gather_texts(self, text: str) -> list[str]: ...

    @abstractmethod
    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> "Communicator":
        """The group `mine`, of `groups`; called also where `mine` is this rank alone, and its result is not used then."""


class CompletedWork:
    """Work that had completed when the call returned."""

    def wait(self) -> None:
        return None


class DeferredWork:
    """Work whose last part, `finish`, runs in the first call of `wait`."""

    def __init__(self, finish: Callable[[], Any]):
        self.finish: Callable[[], Any] | None = finish

    def wait(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


class SingleRankCommunicator(Communicator):
    """The group of a single rank: every operation is the identity, and nothing is sent."""

    def __init__(self, axis: str = "world", member: int = 0, trace: CommTrace | None = None, split_number: int = 0):
        super().__init__((member,), 0, axis, trace or CommTrace(), split_number)

    def dispatch(self, operation: str, payload: Tensor | int, start: Callable[[], Work], *options: Any, **more: Any) -> Work:
        work = start()  # nothing travels, so nothing is counted
        work.wait()
        return work

    def _gather_texts(self, text: str) -> list[str]:
        return [text]

    def _split(self, axis: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Communicator:
        return self

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return CompletedWork()

    def _all_gather(self, whole: Tensor, part: Tensor) -> Work:
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)
        return CompletedWork()

    def _reduce_scatter(self, part: Tensor, whole: Tensor) -> Work:
        if whole.data_ptr() != part.data_ptr():
            part.copy_(whole)
        return CompletedWork()

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return CompletedWork()

    def _all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Work:
        received[0].copy_(sent[0])
        return CompletedWork()

    def _send(self, tensor: Tensor, to: int) -> Work:
        raise AssertionError("require_member refuses it: there is nobody to send to")

    def _receive(self, tensor: Tensor, source: int) -> Work:
        raise AssertionError("require_member refuses it: there is nobody to receive from")

    def _barrier(self) -> Work:
        return CompletedWork()


def require_parts(operation: str, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.dtype != part.dtype:
        raise ValueError(f"{operation}: the whole is {dtype_name(whole)} and a part {dtype_name(part)}: they must have one dtype.")
    if whole.numel() != part.numel() * size:
        held = f"the whole has {whole.numel()} numbers and a part {part.numel()}"
        raise ValueError(f"{operation}: {held}: with {size} ranks it must be {size} times as many. Pad the last part.")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def plain(tensor: Tensor) -> Tensor:
    """The same numbers without autograd, which neither records what comes from other ranks nor counts it as a change.

    Raises:
        ValueError: the tensor is not contiguous, or its storage was let go.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} is not contiguous, and its bytes cannot be handed over: call .contiguous()."
        )
    needed, there = (tensor.storage_offset() + tensor.numel()) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if tensor.numel() and there < needed:
        raise ValueError(f"A tensor needs {needed} bytes and its storage has {there}: give it memory before it travels.")
    return tensor.data


def require_finished(world: Communicator) -> None:
    """Refuse to end with an operation whose result was never waited for: whatever was done with it may have come too early."""
    entry = world.trace.unfinished()
    if entry is not None:
        raise CommunicationError(f"rank {world.rank} ended without waiting for {entry.place}: call wait() on what the operation returned")


def flat_sum(tensors: Sequence[Tensor], op: Reduction = "sum") -> Tensor:
    """The sum (or max, min) of the ranks' tensors, in rank order, so that all ranks come to the same bits."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        combine(total, tensor, out=total)
    return total
