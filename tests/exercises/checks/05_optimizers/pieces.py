"""What the checks of chapter 05 share: random tensors, and one step after another on the same tensors."""

from collections.abc import Callable

import torch
from torch import Tensor


def tensors(dtype=torch.float64, **lists: list[float]) -> dict[str, Tensor]:
    return {name: torch.tensor(values, dtype=dtype) for name, values in lists.items()}


def after(*names: str) -> Callable:
    """An observation: what a function that works in place leaves in these arguments, and that it returns nothing."""

    def observe(function: Callable, **given) -> dict:
        returned = function(**given)
        return {name: given[name].clone() for name in names} | ({} if returned is None else {"returned a value": True})

    return observe


def where_it_lies(*names: str) -> Callable:
    """An observation: what stands in the memory that the arguments had before the call, and whether autograd records afterwards."""

    def observe(function: Callable, **given) -> dict:
        before = {name: given[name].detach() for name in names}  # other tensors over the same memory
        try:
            function(**given)
            return before | {"autograd records afterwards": torch.is_grad_enabled()}
        finally:
            torch.set_grad_enabled(True)

    return observe


def leaves(dtype=torch.float64, **lists: list[float]) -> Callable:
    """The expectation that goes with it."""
    return lambda **given: tensors(dtype, **lists)
