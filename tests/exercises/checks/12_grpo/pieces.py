"""What the checks of chapter 12 share: random numbers, observing a result with its gradients, refusals, and what a call leaves behind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.comparing import Said

CONTRACT = "the contract"
ARITHMETIC = "arithmetic"
ANY = 1e9  # bytes


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_gradients(output: Any, leaves: dict[str, Tensor], name: str, seed: int = 17) -> dict[str, Any]:
    """An output under its name, and what flows back to each leaf from a random gradient behind it; 0 where nothing does."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return {name: output} | {f"gradient of {leaf}": Said("none: what is returned has no gradient") for leaf in leaves}
    flow = randn(*output.shape, seed=seed, dtype=output.dtype)
    found = torch.autograd.grad(output, [*leaves.values()], flow, allow_unused=True, materialize_grads=True)
    return {name: output} | {f"gradient of {leaf}": gradient for leaf, gradient in zip(leaves, found, strict=True)}


def as_leaves(given: dict[str, Any], *names: str) -> dict[str, Tensor]:
    """Copies of some of the arguments, for gradients to flow to."""
    return {name: given[name].detach().clone().requires_grad_() for name in names}


def refused(**_: Any) -> dict[str, str]:
    return {"raised": "ValueError"}


def left_behind(function: Callable, **given: Any) -> dict[str, Any]:
    """Which of torch's settings are others than before any call, whether one drew random numbers, and which arguments ask for other
    gradients."""

    def settings() -> dict[str, Any]:
        asks = {name: value.requires_grad for name, value in given.items() if isinstance(value, Tensor)}
        return asks | {"random numbers": torch.default_generator.get_state().tolist()}

    torch.rand(1)
    before = settings()
    function(**given)
    changed = [name for name, value in settings().items() if value != before[name]]
    fixed = {"default dtype": torch.get_default_dtype() == torch.float32, "gradients": torch.is_grad_enabled()}
    return {"changed by the call": changed + [name for name, kept in fixed.items() if not kept]}


def nothing(**_: Any) -> dict[str, Any]:
    return {"changed by the call": []}
