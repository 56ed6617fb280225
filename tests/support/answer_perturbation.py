"""Right answers, spoilt: a check that lets one of them pass does not look at what it says it looks at.

Reals are scaled by 0, 0.5, 1.05, 2 and -1, and so is what a function changes an argument by; whole numbers are off by one,
tensors and lists with elements have one dropped, doubled, swapped or all of them shifted, and all come in another dtype, shape or
type; of files one is lost, emptied or added, and so are entries of a table; functions that are returned return
spoilt results. `Check.spoilt` says where.
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
            case ["gradients", "of", argument, "when", "called"]:
                answers |= {f"{where}: times {scale}": with_later_gradients(function, argument, scale) for scale in SCALES}
            case ["numbers", "of", name, "when", "done"]:
                changes = {f"times {scale}": lambda after, before, scale=scale: after * scale for scale in SCALES} | IN_PLACE
                answers |= {f"{where}: {how}": when_done(check, function, name, change) for how, change in changes.items()}
            case ["update", "of", argument]:
                answers |= {f"{where}: times {scale}": with_update(function, argument, scale) for scale in SCALES}
            case ["elements", "of", argument]:
                answers |= {f"{where}: {how}": with_elements(function, argument, change) for how, change in IN_PLACE.items()}
            case ["files", "of", argument]:
                answers |= {f"{where}: {how}": with_files(function, argument, change) for how, change in FILES.items()}
            case ["gradients", "through", output]:
                changes = {f"times {scale}": backward_times(scale) for scale in SCALES}
                answers |= {f"{where}: {how}": with_output(check, function, output, change) for how, change in changes.items()}
            case ["results", "of", output]:
                answers |= {f"{where}: {how}": with_output(check, function, output, in_results(change)) for how, change in RESULTS.items()}
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
        first = next(iter(value.values()))
        changes = {how: in_values(change) for how, change in changes_of(first).items()}
        return changes | (ENTRIES if isinstance(first, str | tuple) else {})
    if isinstance(value, list):
        return LIST_CHANGES
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        changes = changes_of(next(item for item in value if isinstance(item, Tensor)))
        return TUPLE_CHANGES | {f"all {how}": in_all(change) for how, change in changes.items()}
    if isinstance(value, float):
        return {f"times {scale}": lambda number, scale=scale: number * scale for scale in SCALES} | {"as a tensor": torch.tensor}
    if isinstance(value, int):
        changes = {"one more": lambda number: number + 1, "one less": lambda number: number - 1, "doubled": lambda number: 2 * number}
        return changes | {"as a float": float}
    if isinstance(value, str):
        return WORD_CHANGES
    if value is None:
        return {"as 0": lambda _: 0, "as a word": lambda _: "None"}
    if isinstance(value, tuple):
        changes = [(place, how, change) for place, part in enumerate(value) for how, change in changes_of(part).items()]
        return {f"part {place}: {how}": in_part(place, change) for place, how, change in changes}
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

TUPLE_CHANGES: dict[str, Change] = {
    "the last one dropped": lambda items: items[:-1],
    "the last one doubled": lambda items: (*items, items[-1]),
    "the first two swapped": lambda items: items[1::-1] + items[2:],
    "the last one as None": lambda items: (*items[:-1], None),
}


WORD_CHANGES: dict[str, Change] = {
    "another word": lambda word: f"{word}s",
    "in capitals": str.upper,
    "in a list": lambda word: [word],
    "as None": lambda word: None,
}

ENTRIES: dict[str, Change] = {  # of a table by name
    "the first entry lost": lambda table: dict([*table.items()][1:]),
    "the last entry lost": lambda table: dict([*table.items()][:-1]),
    "a stray entry": lambda table: table | {"stray.weight": next(iter(table.values()), 0)},
}


def in_values(change: Change) -> Change:
    return lambda table: {name: change(item) for name, item in table.items()}


def in_part(place: int, change: Change) -> Change:
    def changed(items: tuple) -> tuple:
        made = (*items[:place], change(items[place]), *items[place + 1 :])
        return type(items)._make(made) if hasattr(items, "_make") else made

    return changed


def in_all(change: Change) -> Change:
    return lambda items: tuple(None if item is None else change(item) for item in items)


LIST_CHANGES: dict[str, Change] = {
    "one more": lambda items: [item + 1 for item in items],
    "one less": lambda items: [item - 1 for item in items],
    "as a tuple": tuple,
    "last element dropped": lambda items: items[:-1],
    "last element doubled": lambda items: items + items[-1:],
    "first two elements swapped": lambda items: items[1::-1] + items[2:],
    "elements shifted by one": lambda items: items[-1:] + items[:-1],
}


def with_files(function: Callable, argument: str, change: Callable) -> Callable:
    """The function makes a folder whose path is an argument; its files are changed afterwards."""

    def spoilt(*args, **kwargs):
        result = function(*args, **kwargs)
        change(sorted(path for path in argument_of(function, argument, args, kwargs).rglob("*") if path.is_file()))
        return result

    return spoilt


FILES: dict[str, Callable] = {
    "last file removed": lambda files: files[-1].unlink(),
    "first file empty": lambda files: files[0].write_text(""),
    "first file twice as long": lambda files: files[0].write_text(2 * files[0].read_text()),
    "first file under another name": lambda files: files[0].rename(files[0].with_name("other")),
    "a stray file": lambda files: files[0].with_name("stray").touch(),
}


def backward_times(scale: float) -> Change:
    """The value stays, what flows back through it is scaled."""
    return lambda tensor: tensor.detach() + scale * (tensor - tensor.detach())


def in_results(change: Change) -> Change:
    """Of a function: what it returns is changed."""
    return lambda function: lambda *args: change(function(*args))


RESULTS: dict[str, Change] = (
    {f"times {scale}": lambda tensor, scale=scale: tensor * scale for scale in SCALES}
    | {f"gradients times {scale}": backward_times(scale) for scale in SCALES}
    | {"in another dtype": lambda tensor: tensor.to(torch.float16), "elements shifted by one": lambda tensor: tensor.roll(1, dims=-1)}
)


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
    if isinstance(value, Mapping):
        return {**value, path[0]: replaced(value[path[0]], path[1:], change)}
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


def with_elements(function: Callable, argument: str, change: Callable) -> Callable:
    """The function changes a tensor in place; its elements are moved afterwards."""

    def spoilt(*args, **kwargs):
        tensor = argument_of(function, argument, args, kwargs)
        before = tensor.detach().clone()
        result = function(*args, **kwargs)
        tensor.copy_(change(tensor.detach().clone().view(-1), before.view(-1)).view(tensor.shape))
        return result

    return spoilt


IN_PLACE: dict[str, Callable] = {
    "first two elements swapped": lambda after, before: swapped(after),
    "elements shifted by one": lambda after, before: after.roll(1),
    "the last element as it was": lambda after, before: torch.cat([after[:-1], before[-1:]]),
    "the first element as it was": lambda after, before: torch.cat([before[:1], after[1:]]),
}


def when_done(check: Check, function: Callable, name: str, change: Callable) -> Callable:
    """The function returns an operation under way, alone or last; when it is done, an output or an argument is changed in place."""

    def spoilt(*args, **kwargs):
        result = function(*args, **kwargs)
        work = result[-1] if isinstance(result, tuple) else result
        tensor = result[check.outputs.index(name)] if name in check.outputs else argument_of(function, name, args, kwargs)
        before, wait = torch.zeros_like(tensor), work.wait

        def wait_and_change():
            wait()
            tensor.copy_(change(tensor.clone(), before))

        work.wait = wait_and_change
        return result

    return spoilt


def with_later_gradients(function: Callable, argument: str, scale: float) -> Callable:
    """The function returns a function that completes the gradients of an argument's parameters, in buckets; then they are scaled."""

    def spoilt(*args, **kwargs):
        finish = function(*args, **kwargs)
        buckets = argument_of(function, argument, args, kwargs)

        def finish_and_scale():
            finish()
            for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
                parameter.grad.mul_(scale)

        return finish_and_scale

    return spoilt


def with_update(function: Callable, argument: str, scale: float) -> Callable:
    def spoilt(*args, **kwargs):
        updated = argument_of(function, argument, args, kwargs)
        parameters = [updated] if isinstance(updated, Tensor) else list(updated.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        result = function(*args, **kwargs)
        with torch.no_grad():
            for parameter, start in zip(parameters, before, strict=True):
                parameter.copy_(start + scale * (parameter - start))
        return result

    return spoilt
