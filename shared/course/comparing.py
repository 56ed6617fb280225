"""Floor 0. Comparing results with what was expected, and printing both so that the difference can be seen."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

FEW = 12  # elements that are printed in full
LONG = 240  # characters of a nested value


class Said(str):
    """Words in place of a result, such as why there is none. They are printed also where only shapes and dtypes are compared."""


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested results as one level of dotted names: {"totals.loss_sum": ...}. A list of numbers or words stays whole."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and not all(isinstance(item, int | float | str) for item in value):
        items = enumerate(value)
    else:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= flatten(item, f"{name}.{key}" if name else str(key))
    return flat


def differences(expected: Mapping[str, Any], observed: Mapping[str, Any], rtol: float, atol: float) -> list[str]:
    """Lines that say where two observations differ; none where they agree. NaN equals NaN and nothing else."""
    if "raised" in observed and "raised" not in expected:
        return ["came out  an exception", *(f"expected  {name} = {written(value)}" for name, value in [*expected.items()][:3])]
    if "returned" in observed and "returned" not in expected:
        return [f"came out  {written(observed['returned'])}", f"expected  {len(expected)} results: {', '.join(expected)}"]
    lines = []
    for name in expected:
        if name in observed:
            note = difference(expected[name], observed[name], rtol, atol)
            if note is not None:
                wanted = f"{written(expected[name])}   {note}".rstrip()
                lines += [f"came out  {name} = {written(observed[name])}", f"expected  {name} = {wanted}"]
        elif not any(name.startswith(f"{whole}.") for whole in observed):
            lines.append(f"missing   {'the exception ' + str(expected[name]) if name == 'raised' else name}")
    for name in (name for name in observed if name not in expected):
        parts = [part.removeprefix(f"{name}.") for part in expected if part.startswith(f"{name}.")]
        lines.append(f"came out  it {name}" if observed[name] is True else f"came out  {name} = {written(observed[name])}")
        lines += [f"expected  {name} with {', '.join(parts)}"] if parts else []
    return lines


def agree(expected: Mapping[str, Any], observed: Mapping[str, Any], rtol: float, atol: float) -> bool:
    """Whether two observations are the same: where `differences` would have no line to say, which takes longer to find out."""
    return expected.keys() == observed.keys() and all(equal(expected[name], observed[name], rtol, atol) for name in expected)


def equal(expected: Any, observed: Any, rtol: float, atol: float) -> bool:
    if isinstance(expected, Tensor) and isinstance(observed, Tensor):
        same_form = expected.shape == observed.shape and expected.dtype == observed.dtype
        return same_form and bool(close(expected.detach(), observed.detach(), rtol, atol).all())
    if type(expected) is not type(observed):
        return False
    if isinstance(expected, float):
        left, right = torch.tensor([expected, observed], dtype=torch.float64)
        return bool(close(left, right, rtol, atol))
    return bool(expected == observed)


def close(expected: Tensor, observed: Tensor, rtol: float, atol: float) -> Tensor:
    """Where two tensors of one shape and dtype agree."""
    if expected.dtype.is_floating_point:
        return torch.isclose(observed.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)
    return observed == expected


def is_float(value: Any, dtype: torch.dtype) -> bool:
    """Whether a value has this dtype. A number of Python's is float64."""
    return isinstance(value, float) and dtype == torch.float64 or isinstance(value, Tensor) and value.dtype == dtype


def distance(expected: Any, observed: Any) -> float:
    """The largest difference of two tensors, or two numbers, relative to the largest number that was expected; inf for other shapes."""
    left, right = (torch.as_tensor(value).detach() for value in (expected, observed))
    if left.shape != right.shape or not left.numel():
        return torch.inf
    return ((left - right).abs().max() / left.abs().max()).item()


def difference(expected: Any, observed: Any, rtol: float, atol: float) -> str | None:
    """None where two values agree; otherwise a note to print after them, which may be empty."""
    if equal(expected, observed, rtol, atol):
        return None
    if isinstance(expected, Tensor) and isinstance(observed, Tensor):
        return tensor_difference(expected.detach(), observed.detach(), rtol, atol)
    if type(expected) is not type(observed):
        plain = expected is not None and observed is not None and not isinstance(observed, Said)
        return f"({form(observed)} in place of {form(expected)})" if plain else ""
    if isinstance(expected, float):
        left, right = torch.tensor([expected, observed], dtype=torch.float64)
        return tensor_difference(left, right, rtol, atol)
    return ""


def tensor_difference(expected: Tensor, observed: Tensor, rtol: float, atol: float) -> str:
    """Where and how two tensors differ."""
    if expected.shape != observed.shape:
        return f"(shape {list(observed.shape)}, expected {list(expected.shape)})"
    if expected.dtype != observed.dtype:
        return f"({observed.dtype}, expected {expected.dtype})"
    apart = ~close(expected, observed, rtol, atol)
    if print_alike(expected[apart], observed[apart]) and print_alike(expected, observed):
        return f"(they differ by up to {(observed.double() - expected.double()).abs().max().item():.1g}, which is too much)"
    if expected.numel() <= FEW:
        return ""
    at = tuple(apart.nonzero()[0].tolist())
    found, wanted = f"{observed[at].item():.6g}", f"{expected[at].item():.6g}"
    if found == wanted:
        gap = abs(observed[at].item() - expected[at].item())
        return f"(first at {list(at)}: they differ by {gap:.1g}, which is too much)"
    return f"(first at {list(at)}: {found}, expected {wanted})"


def print_alike(expected: Tensor, observed: Tensor) -> bool:
    """Whether all numbers of two tensors of one shape and dtype are printed the same."""
    pairs = zip(expected.flatten().tolist(), observed.flatten().tolist(), strict=True)
    return all(number(one, expected.dtype) == number(other, expected.dtype) for one, other in pairs)


def written(value: Any) -> str:
    """A value on one line: small tensors in full, large ones by shape and first elements, modules by their weights."""
    if isinstance(value, Tensor):
        if value.numel() <= FEW:
            return f"{numbers(value)}  ({form(value)})"
        return f"{numbers(value.flatten()[:4])[:-1]}, ...]  ({form(value)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return clipped("{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}")
    if isinstance(value, tuple) and type(value).__str__ is not object.__str__:  # a named tuple that writes itself, such as an action
        return str(value)
    if isinstance(value, list | tuple):
        return clipped("[" + ", ".join(written(item) for item in value) + "]")
    if isinstance(value, nn.Module):
        return clipped(f"{type(value).__name__} with {written(dict(value.named_parameters()))}")
    if isinstance(value, Optimizer):
        return f"{type(value).__name__} with lr {value.defaults['lr']:g}"
    if isinstance(value, Generator):
        return f"torch.Generator, seed {value.initial_seed()}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value):
        return described(value)
    return clipped(str(value)) if isinstance(value, str | int | None) else type(value).__name__


def form(value: Any) -> str:
    """The kind of a value without its numbers: "float32 [3, 4]" for a tensor, the type's name for the rest."""
    if not isinstance(value, Tensor):
        return str(value) if isinstance(value, Said) else "None" if value is None else type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)}" if value.dim() else f"{dtype}, a scalar"


def described(function: Callable) -> str:
    """A function by its name, or an object that is called like one by its type's, and the first line of its docstring."""
    owner = function if hasattr(function, "__name__") else type(function)
    sentence = (owner.__doc__ or "").strip().split("\n")[0]
    return f"{owner.__name__}: {sentence}" if sentence else owner.__name__


def clipped(text: str) -> str:
    return text if len(text) <= LONG else f"{text[:LONG]} ..."


def numbers(tensor: Tensor) -> str:
    if tensor.dim() == 0:
        return number(tensor.item(), tensor.dtype)
    return "[" + ", ".join(numbers(part) for part in tensor.detach()) + "]"


def number(value: Any, dtype: torch.dtype) -> str:
    return f"{value:.6g}" if dtype.is_floating_point else str(value)
