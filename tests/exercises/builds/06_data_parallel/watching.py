"""Build 06: what the checks watch of a rank, its memory and its communication."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import TraceEntry

WITHIN = "within the limit"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def within(value: int, limit: int, unit: str = "bytes") -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the limit is {limit:,}"


def large(group: Communicator, least: int) -> list[TraceEntry]:
    """The sums that a rank has started of more than `least` bytes: gradients, and not counts or flags."""
    return [entry for entry in group.trace.entries if entry.operation in ("all_reduce", "reduce_scatter") and entry.bytes > least]


class Memory(TorchDispatchMode):
    """The memory of a rank's tensors: of a model's weights, and of all that is made under it. What the communicator makes is not counted.

    most: the most bytes at a time, as seen at each matrix product, and whenever the rank communicates.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.paused, self.most = False, 0
        for weight in model.parameters():
            self.see(weight.untyped_storage())

    def see(self, storage: torch.UntypedStorage) -> None:
        known = self.storages.get(storage._cdata)
        if known is None or known.expired():
            self.storages[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, function: Callable, types: Any, arguments: tuple = (), named: dict | None = None) -> Any:
        result = function(*arguments, **named or {})
        if not self.paused:
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, Tensor):
                    self.see(tensor.untyped_storage())
            if function._schema.name in PRODUCTS:
                self.look()
        return result

    def look(self) -> None:
        self.most = max(self.most, self.alive())

    def left(self, limit: int, but: int = 0) -> str:
        """Whether what is alive, less `but`, is within a limit. What is only part of a circle of references may go first."""
        if self.alive() - but > limit:
            gc.collect()
        return within(self.alive() - but, limit)

    def alive(self) -> int:
        """Bytes of all these tensors that there are now. A storage that was resized counts as large as it is."""
        total = 0
        for key, reference in list(self.storages.items()):
            storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.storages[key]
            else:
                total += storage.nbytes()
        return total


class Quiet:
    """A communicator whose own copies of tensors are not counted as the rank's memory."""

    def __init__(self, inner: Any, memory: Memory):
        self.inner, self.memory = inner, memory

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            self.memory.look()
            self.memory.paused = True
            try:
                result = value(*arguments, **named)
            finally:
                self.memory.paused = False
            return Quiet(result, self.memory) if hasattr(result, "wait") else result

        return call
