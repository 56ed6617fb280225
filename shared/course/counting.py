"""Floor 0. What a call costs, for checks: operations of torch, tensors made into lists, and bytes held at a time."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Listed(TorchFunctionMode):
    """Notices tensors that are made into lists, over which Python can loop without an operation of torch."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += [name for name in ("tolist", "numpy") if getattr(function, "__name__", "") == name]
        return function(*args, **(kwargs or {}))


class Used(TorchDispatchMode):
    """Counts the operations of torch that run, the most bytes that tensors made by them hold at a time, and how often a shape is made."""

    def __init__(self):
        super().__init__()
        self.operations, self.alive, self.peak, self.known = 0, 0, 0, set()
        self.largest, self.shapes = (0, []), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        before = storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        for made in dense(result):
            if (storage := made.untyped_storage())._cdata not in before.keys() | self.known:
                self.hold(storage)
                self.shapes.append([*made.shape])
                self.largest = max(self.largest, (storage.nbytes(), [*made.shape]))
        return result

    def hold(self, storage: torch.UntypedStorage) -> None:
        self.known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())

    def release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = [tensor.untyped_storage() for tensor in dense(tree)]
    return {storage._cdata: storage for storage in found}


def dense(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have a storage of their own. A sparse one has none: its places and its numbers stand for it."""
    found = []
    for tensor in (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)):
        match tensor.layout:
            case torch.sparse_coo:
                found += [tensor._indices(), tensor._values()]
            case torch.sparse_csr | torch.sparse_bsr:
                found += [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
            case torch.sparse_csc | torch.sparse_bsc:
                found += [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
            case _:
                found.append(tensor)
    return found


def cost(function: Callable, limit: float, unit: int, sizes: dict[str, dict]) -> dict[str, Any]:
    """Which of several sizes take more operations than the first, and whether the first call holds at most `limit` times `unit` bytes."""
    found = {}
    for name, arguments in sizes.items():
        with Listed() as listed, Used() as found[name]:
            function(**arguments)
    first, *_ = found.values()
    return {
        "sizes that take more operations of torch": [name for name, used in found.items() if used.operations > first.operations],
        "tensors made into lists": listed.calls,
        "memory held at a time": at_most(limit) if first.peak / unit <= limit else f"more: its largest tensor is {first.largest[1]}",
    }


def within(limit: float) -> dict[str, Any]:
    return {"sizes that take more operations of torch": [], "tensors made into lists": [], "memory held at a time": at_most(limit)}


def at_most(limit: float) -> str:
    return f"at most {limit:g} of these tensors"
