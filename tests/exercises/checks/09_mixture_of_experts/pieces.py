"""What the checks of chapter 09 share: gradients as results, and sorts as a GPU may do them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.comparing import Said

CONTRACT = "the contract"


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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
