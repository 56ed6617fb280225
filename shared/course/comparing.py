"""Floor 0. Comparing what came out with what was expected, and writing both so that the difference can be seen."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FEW = 12  # elements that are printed in full


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested results as one level of dotted names: {"totals.loss_sum": ...}."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= flatten(item, f"{name}.{key}" if name else str(key))
    return flat


def differences(expected: Mapping[str, Any], observed: Mapping[str, Any], rtol: float, atol: float) -> list[str]:
    """Lines that say where two observations differ; none where they agree. NaN equals NaN and nothing else."""
    lines = []
    for name in [*expected, *(name for name in observed if name not in expected)]:
        if name == "raised" and name not in expected:
            lines.append("came out  an exception")
        elif name not in expected:
            lines.append(f"came out  {name}: {written(observed[name])}" if observed[name] is not True else f"came out  it {name}")
        elif name not in observed:
            lines.append(f"missing   {'the exception ' + str(expected[name]) if name == 'raised' else name}")
        elif (note := difference(expected[name], observed[name], rtol, atol)) is not None:
            lines.append(f"came out  {name} = {written(observed[name])}")
            lines.append(f"expected  {name} = {written(expected[name])}{note and '   ' + note}")
    return lines


def difference(expected: Any, observed: Any, rtol: float, atol: float) -> str | None:
    """None where two values agree; otherwise a note for beside their print, which may be empty."""
    if isinstance(expected, Tensor) and isinstance(observed, Tensor):
        return tensor_difference(expected.detach(), observed.detach(), rtol, atol)
    if type(expected) is not type(observed):
        return f"(a {type(observed).__name__}, expected a {type(expected).__name__})"
    if isinstance(expected, float):
        left, right = torch.tensor([expected, observed], dtype=torch.float64)
        return tensor_difference(left, right, rtol, atol)
    return None if expected == observed else ""


def tensor_difference(expected: Tensor, observed: Tensor, rtol: float, atol: float) -> str | None:
    if expected.shape != observed.shape:
        return f"(shape {list(observed.shape)}, expected {list(expected.shape)})"
    if expected.dtype != observed.dtype:
        return f"({observed.dtype}, expected {expected.dtype})"
    if expected.dtype.is_floating_point:
        close = torch.isclose(observed.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)
    else:
        close = observed == expected
    if close.all():
        return None
    if expected.numel() <= FEW:
        return ""
    at = tuple((~close).nonzero()[0].tolist())
    return f"(first at {list(at)}: {observed[at].item():.6g}, expected {expected[at].item():.6g})"


def written(value: Any) -> str:
    """A value on one line: small tensors in full, large ones by shape and first elements."""
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if value.numel() <= FEW:
            return f"{numbers(value)}  ({kind})" if value.dim() else f"{numbers(value)}  ({kind.removesuffix(' []')})"
        return f"{numbers(value.flatten()[:4])[:-1]}, ...]  ({kind})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    return str(value)


def numbers(tensor: Tensor) -> str:
    if tensor.dim() == 0:
        return f"{tensor.item():.6g}" if tensor.dtype.is_floating_point else str(tensor.item())
    return "[" + ", ".join(numbers(part) for part in tensor.detach()) + "]"
