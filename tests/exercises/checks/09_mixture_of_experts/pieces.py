"""What the checks of chapter 09 share: functions of transformers without its import, sorts as a GPU may do them, and what a call costs."""

import ast
import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.course.comparing import Said

CONTRACT = "the contract"


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def from_transformers(model: str, name: str) -> Any:
    """A function or class of transformers' modeling file of a model, by itself: its import would take seconds."""
    package = Path(importlib.util.find_spec("transformers").origin).parent
    text = (package / "models" / model / f"modeling_{model}.py").read_text(encoding="utf-8")
    node = next(node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    node.decorator_list = []
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    exec(compile("from __future__ import annotations\n" + ast.unparse(node), f"transformers' {name}", "exec"), names)
    return names[name]


def unchanged(sent: list[int], received: list[int]) -> dict[str, Said]:
    """Numbers of rows, as they are after a call."""
    return {"`sent`, unchanged": Said(sent), "`received`, unchanged": Said(received)}


def gradients(output: Any, seed: int = 17, **arguments: Tensor) -> dict[str, Any]:
    """What flows back to each argument through an output, from a random gradient behind it."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return {f"gradient of {name}": Said("none: what is returned has no gradient") for name in arguments}
    flow = randn(*output.shape, seed=seed, dtype=output.dtype)
    found = torch.autograd.grad(output, [*arguments.values()], flow, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(arguments, found, strict=True)}


class TiesReversed(TorchDispatchMode):
    """Sorts that are not called stable put equal elements in reversed order, as they may do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.sort.default or (function is torch.ops.aten.sort.stable and not kwargs.get("stable")):
            x, dim, descending = ([*args, *(kwargs.get("dim", -1), kwargs.get("descending", False))][place] for place in range(3))
            values, places = torch.ops.aten.sort.stable(x.flip(dim), stable=True, dim=dim, descending=descending)
            return values, x.shape[dim] - 1 - places
        return function(*args, **kwargs)


class Listed(TorchFunctionMode):
    """Notices tensors that are made into lists, over which Python can loop without an operation of torch."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += [name for name in ("tolist", "numpy") if getattr(function, "__name__", "") == name]
        return function(*args, **(kwargs or {}))


class Used(TorchDispatchMode):
    """Counts the operations of torch that run, and the most bytes that tensors made by them hold at a time."""

    def __init__(self):
        super().__init__()
        self.operations, self.alive, self.peak, self.known = 0, 0, 0, set()
        self.largest, self.shape = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        before = storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        for key, storage in storages(result).items():
            if key not in before.keys() | self.known:
                self.known.add(key)
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self.release, key, storage.nbytes())
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (storage := made.untyped_storage())._cdata not in before and storage.nbytes() > self.largest:
                self.largest, self.shape = storage.nbytes(), [*made.shape]
        return result

    def release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


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
        "memory held at a time": at_most(limit) if first.peak / unit <= limit else f"more: its largest tensor is {first.shape}",
    }


def within(limit: float) -> dict[str, Any]:
    return {"sizes that take more operations of torch": [], "tensors made into lists": [], "memory held at a time": at_most(limit)}


def at_most(limit: float) -> str:
    return f"at most {limit:g} of these tensors"
