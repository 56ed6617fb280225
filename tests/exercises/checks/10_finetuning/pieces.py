"""What the checks of chapter 10 share: random numbers and gradients through a result."""

from typing import Any

import torch
from torch import Tensor

from shared.course.comparing import Said

CONTRACT = "the contract"


def randn(*shape: int, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(output: Any, seed: int = 17, **arguments: Tensor) -> dict[str, Any]:
    """What flows back to each argument through an output, from a random gradient behind it."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return {f"gradient of {name}": Said("none: what is returned has no gradient") for name in arguments}
    flow = randn(*output.shape, seed=seed, dtype=output.dtype)
    found = torch.autograd.grad(output, [*arguments.values()], flow, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(arguments, found, strict=True)}
