"""What the checks of every chapter share: random numbers, results with their gradients, refusals, and cases of one tolerance."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.comparing import Said

CONTRACT = "the contract"
ARITHMETIC = "arithmetic"
ANY = 1e9  # bytes


def randn(*shape: int, seed: int, dtype=torch.float64, scale: float = 1.0) -> Tensor:
    """Random numbers, drawn in float64 and rounded to a dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def as_leaves(given: dict[str, Any], *names: str) -> dict[str, Tensor]:
    """Copies of some of the arguments, for gradients to flow to."""
    return {name: given[name].detach().clone().requires_grad_() for name in names}


def with_gradients(output: Any, leaves: dict[str, Tensor], name: str = "loss", seed: int = 17) -> dict[str, Any]:
    """An output under its name, and what flows back to each leaf from a random gradient behind it; 0 where nothing does."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return {name: output} | {f"gradient of {leaf}": Said("none: what is returned has no gradient") for leaf in leaves}
    flow = randn(*output.shape, seed=seed, dtype=output.dtype)
    found = torch.autograd.grad(output, [*leaves.values()], flow, allow_unused=True, materialize_grads=True)
    return {name: output} | {f"gradient of {leaf}": gradient for leaf, gradient in zip(leaves, found, strict=True)}


def gradients(output: Any, seed: int = 17, **arguments: Tensor) -> dict[str, Any]:
    """What flows back to each argument through an output, from a random gradient behind it."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return {f"gradient of {name}": Said("none: what is returned has no gradient") for name in arguments}
    flow = randn(*output.shape, seed=seed, dtype=output.dtype)
    found = torch.autograd.grad(output, [*arguments.values()], flow, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(arguments, found, strict=True)}


def strided(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments whose tensors hold the same numbers and are not contiguous."""

    def of(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], dim=1)[:, 0] if tensor.dim() == 1 else tensor.T.contiguous().T

    return {name: of(value) if isinstance(value, Tensor) else value for name, value in given.items()}


def broken(given: dict[str, Any], name: str, place: int = 2) -> dict[str, Any]:
    """Arguments with a NaN in one of the tensors."""
    given[name][place] = torch.nan
    return given


def refused(**_: Any) -> dict[str, str]:
    return {"raised": "ValueError"}


def cases_of(expected: Callable, source: str, observe: Callable | None = None, tolerance: float = 1e-12) -> Callable[..., Case]:
    """How a check writes its cases: what most of them expect, from which source, observed how, and to which tolerance."""
    usual = expected, source, observe, tolerance

    def case(rung, title, given, expected=usual[0], source=usual[1], observe=usual[2], tolerance=usual[3], least=None) -> Case:
        least = tolerance if least is None else least
        return Case(rung, title, given, expected, source, *([] if observe is None else [observe]), rtol=tolerance, atol=least)

    return case
