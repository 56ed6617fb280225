"""What the checks of chapter 11 share: random numbers, observing a loss with its gradients, and what a call costs."""

from typing import Any

import torch
from torch import Tensor

from shared.course.comparing import Said

CONTRACT = "the contract"
ANY = 1e9  # bytes


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_gradients(output: Any, leaves: dict[str, Tensor], seed: int = 17, name: str = "loss") -> dict[str, Any]:
    """An output under its name, and what flows back to each leaf from a random gradient behind it; 0 where nothing does."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return {name: output} | {f"gradient of {leaf}": Said("none: what is returned has no gradient") for leaf in leaves}
    flow = randn(*output.shape, seed=seed, dtype=output.dtype)
    found = torch.autograd.grad(output, [*leaves.values()], flow, allow_unused=True, materialize_grads=True)
    return {name: output} | {f"gradient of {leaf}": gradient for leaf, gradient in zip(leaves, found, strict=True)}


def as_leaves(given: dict[str, Any], *names: str) -> dict[str, Tensor]:
    """Copies of some of the arguments, for gradients to flow to."""
    return {name: given[name].detach().clone().requires_grad_() for name in names}


def narrowed(found: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.detach().to(dtype) for name, value in found.items()}
