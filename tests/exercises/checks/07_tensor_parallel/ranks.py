"""What the checks of chapter 07 share: ranks as threads, what they send, and what they hold at most."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.parallel.comm.threads import run_threads

CONTRACT = "the contract"


def over_ranks(work: Callable, ranks: int) -> dict:
    """`work(world)` on each rank, by rank."""
    return {f"rank {rank}": result for rank, result in enumerate(run_threads(work, ranks))}


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sent(world, since: int = 0) -> list[str]:
    """What a rank's trace lists, from an entry on."""
    return [f"{entry.operation} of {entry.bytes} bytes" for entry in world.trace.entries[since:]]


class Used(TorchDispatchMode):
    """Counts, in its thread, the operations of torch that run, and the most bytes that their new tensors hold at a time."""

    def __init__(self):
        super().__init__()
        self.operations, self.alive, self.peak, self.known = 0, 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        before = {self.key(tensor) for tensor in tree_leaves((args, kwargs or {})) if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := self.key(tensor)) not in before | self.known:
                self.hold(tensor.untyped_storage(), key)
        return result

    @staticmethod
    def key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def hold(self, storage, key: int) -> None:
        bytes = storage.nbytes()

        def release():
            self.alive -= bytes
            self.known.discard(key)

        self.known.add(key)
        self.alive += bytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, release)
