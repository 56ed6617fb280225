"""Right answers, spoilt: a check that lets one of them pass does not look at what it says it looks at.

Reals are scaled by 0, 0.5, 1.05, 2 and -1, whole numbers are off by one, tensors with elements have one dropped, doubled,
swapped or all of them shifted, and all come in another dtype or shape. `Check.spoilt` says where.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Check, observe

SCALES = (0.0, 0.5, 1.05, 2.0, -1.0)

Change = Callable[[Any], Any]


def spoilt_answers(check: Check, function: Callable) -> dict[str, Callable]:
    """Every spoilt version of a right answer, by what is wrong with it: {"loss_sum: times 0.5": ...}."""
    answers = {}
    for where in check.spoilt:
        match where.split():
            case ["gradients", "of", argument]:
                answers |= {f"{where}: times {scale}": with_gradients(function, argument, scale) for scale in SCALES}
            case ["update", "of", argument]:
                answers |= {f"{where}: times {scale}": with_update(function, argument, scale) for scale in SCALES}
            case ["gradients", "through", output]:
                changes = {f"times {scale}": backward_times(scale) for scale in SCALES}
                answers |= {f"{where}: {how}": with_output(check, function, output, change) for how, change in changes.items()}
            case [output]:
                changes = changes_of(sample(check, function, output))
                answers |= {f"{where}: {how}": with_output(check, function, output, change) for how, change in changes.items()}
    return answers


def sample(check: Check, function: Callable, output: str) -> Any:
    """What a right answer returns under a name on the first case."""
    seen = []
    observe(check, check.cases[0], with_output(check, function, output, lambda value: seen.append(value) or value))
    return seen[0]


def changes_of(value: Any) -> dict[str, Change]:
    """The ways to spoil a value of this kind. A mapping is spoilt in all its values at once."""
    if isinstance(value, Mapping):
        changes = changes_of(next(iter(value.values())))
        return {how: lambda values, change=change: {name: change(item) for name, item in values.items()} for how, change in changes.items()}
    if not isinstance(value, Tensor):
        raise TypeError(f"There is no way yet to spoil a {type(value).__name__}: add one here.")
    if value.dtype.is_floating_point:
        changes = {f"times {scale}": lambda tensor, scale=scale: tensor * scale for scale in SCALES}
    else:
        changes = {"one more": lambda tensor: tensor + 1, "one less": lambda tensor: tensor - 1}
    other = {torch.float64: torch.float32, torch.int64: torch.int32}.get(value.dtype, torch.float64)
    changes |= {"in another dtype": lambda tensor: tensor.to(other), "with a dimension too many": lambda tensor: tensor.unsqueeze(0)}
    return changes | (ELEMENTS if value.dim() else {})


def swapped(tensor: Tensor) -> Tensor:
    return tensor if len(tensor) < 2 else torch.cat([tensor[1:2], tensor[:1], tensor[2:]])


ELEMENTS: dict[str, Change] = {
    "last element dropped": lambda tensor: tensor[:-1],
    "last element doubled": lambda tensor: torch.cat([tensor, tensor[-1:]]),
    "first two elements swapped": swapped,
    "elements shifted by one": lambda tensor: tensor.roll(1, dims=0),
}


def backward_times(scale: float) -> Change:
    """The value stays, what flows back through it is scaled."""
    return lambda tensor: tensor.detach() + scale * (tensor - tensor.detach())


def with_output(check: Check, function: Callable, output: str, change: Change) -> Callable:
    first, *rest = output.split(".")
    place = check.outputs.index(first)

    def spoilt(*args, **kwargs):
        result = function(*args, **kwargs)
        if len(check.outputs) == 1:
            return replaced(result, rest, change)
        return tuple(replaced(part, rest, change) if number == place else part for number, part in enumerate(result))

    return spoilt


def replaced(value: Any, path: list[str], change: Change) -> Any:
    """`value` with the part at `path` changed, in a copy."""
    if not path:
        return change(value)
    return value._replace(**{path[0]: replaced(getattr(value, path[0]), path[1:], change)})


def argument_of(function: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    return inspect.signature(function).bind(*args, **kwargs).arguments[name]


def with_gradients(function: Callable, argument: str, scale: float) -> Callable:
    def spoilt(*args, **kwargs):
        result = function(*args, **kwargs)
        for parameter in argument_of(function, argument, args, kwargs).parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return result

    return spoilt


def with_update(function: Callable, argument: str, scale: float) -> Callable:
    def spoilt(*args, **kwargs):
        parameters = list(argument_of(function, argument, args, kwargs).parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        result = function(*args, **kwargs)
        with torch.no_grad():
            for parameter, start in zip(parameters, before, strict=True):
                parameter.copy_(start + scale * (parameter - start))
        return result

    return spoilt
