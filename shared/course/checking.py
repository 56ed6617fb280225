"""Floor 0. Checks of exercises: cases from easy to hard, each comparing what an answer does with what an oracle expects.

A case makes fresh arguments, observes the function on them (its named results, or the exception that it raised) and
compares with what its source says. How a check's cases judge an answer stands in `judging`.
"""

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.comparing import differences, flatten, form, written

SHAPE = "shape and dtype"
RUNGS = (SHAPE, "worked example", "property", "oracle", "two ranks", "budget")

LEARNERS = re.compile(r"\bchapters/\w+/(exercises|build|hunts/\w+)\.py$")  # files that a learner writes
PROBLEMS = 6  # lines of them that are shown: came out and expected, for three results

Observation = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One question to an answer.

    rung: which of RUNGS this case is on; a check's cases climb in that order. On the first, results are compared by
        shape and dtype only.
    title: what is asked, as a person would say it.
    given: makes fresh arguments, the same ones at each call.
    expected: expected(**given()) -> named results, by the oracle's way of getting them.
    source: who says so.
    observe: observe(function, **given()) -> named results; default: the function's return value, under the check's names.
    changes: the arguments that the function may change.
    rtol, atol: tolerances for floating-point results; the check's file says why.
    """

    rung: str
    title: str
    given: Callable[[], dict[str, Any]]
    expected: Callable[..., Observation]
    source: str
    observe: Callable[..., Observation] | None = None
    changes: tuple[str, ...] = ()
    rtol: float = 1e-6
    atol: float = 0.0


@dataclass(frozen=True)
class Check:
    """What decides whether an answer is right.

    outputs: names of the return value, or of its parts where it is a tuple.
    spoilt: where the harness spoils a right answer to see that the check notices: names of `outputs` (dotted for a
        part: "totals.loss_sum"), "gradients through OUTPUT" for what flows back through a result, and
        "gradients of ARGUMENT", "update of ARGUMENT" for what the function leaves in a module, "elements of ARGUMENT" for
        the tensor that it works in, "files of ARGUMENT" for what it leaves in a folder.
    forbidden: functions of torch that are the exercise itself.
    """

    exercise: str
    outputs: tuple[str, ...]
    cases: Sequence[Case]
    spoilt: tuple[str, ...]
    forbidden: tuple[str, ...] = ()
    seconds: float = 20.0


def expectation(case: Case) -> Observation:
    torch.default_generator.manual_seed(0)  # torch.manual_seed also visits accelerators, which takes longer than most cases
    return results(case, case.expected(**case.given()))


def results(case: Case, value: Any) -> Observation:
    flat = flatten(value)
    return {name: form(item) for name, item in flat.items()} if case.rung == SHAPE and "raised" not in flat else flat


def observe(check: Check, case: Case, function: Callable) -> tuple[Observation, Exception | None]:
    """What `function` does on a case: its flattened results, or `raised`; and `changed` for arguments it spoilt."""
    torch.default_generator.manual_seed(0)
    given, recording = case.given(), torch.is_grad_enabled()
    with Forbidden(check.forbidden) as calls:
        try:
            if case.observe is None:
                result, error = results(case, named(check, function(**given))), None
            else:
                result, error = results(case, case.observe(function, **given)), None
        except Exception as raised:  # also of a list that holds itself, which has no end to look through
            result, error = {"raised": type(raised).__name__}, raised
    if torch.is_grad_enabled() != recording:
        torch.set_grad_enabled(recording)  # the next case, and the check's own oracle, need it as it was
        result[f"left gradient recording switched {'off' if recording else 'on'} for everything that comes after"] = True
    for name, fresh in case.given().items():
        if name not in case.changes and (change := changed(flatten(contents(fresh)), flatten(contents(given[name])))):
            result[f"changed its argument {name}{change}"] = True
    for called in sorted(calls.made):
        result[f"called torch's own {called}, which is what this exercise is to write"] = True
    return result, error


def named(check: Check, result: Any) -> Observation:
    if len(check.outputs) == 1:
        return {check.outputs[0]: result}
    if isinstance(result, tuple) and len(result) == len(check.outputs):
        return dict(zip(check.outputs, result, strict=True))
    return {"returned": result}


def contents(value: Any) -> Any:
    """What must be the same in an argument after the call. Callables and generators are not inspected."""
    match value:
        case nn.Module():
            return dict(value.named_parameters()) | dict(value.named_buffers()) | {"training": value.training}
        case dict():
            return {key: contents(item) for key, item in value.items()}
        case list() | tuple():
            return [contents(item) for item in value]
        case Tensor() | int() | float() | str() | None:
            return value
    return None


def changed(before: Observation, after: Observation) -> str:
    """What of an argument's contents is not as it was, in words; nothing where all is."""
    for part in before | after:
        if differences({part: before.get(part)}, {part: after.get(part)}, 0.0, 0.0):
            return f": {part or 'it'} is now {written(after.get(part))}, was {written(before.get(part))}"
    return ""


class Forbidden(torch.overrides.TorchFunctionMode):
    """Notices calls of the functions of torch that an exercise asks to write."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        self.names, self.made = names, set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (name := getattr(function, "__name__", "")) in self.names:
            self.made.add(name)
        return function(*args, **(kwargs or {}))


def describe(case: Case, problems: list[str], error: Exception | None) -> list[str]:
    """A failing case as lines: what was given, what came out, what was expected, who says so, and where it was raised."""
    lines = [f"given     {name} = {written(value)}" for name, value in case.given().items()] + problems[:PROBLEMS]
    if len(problems) > PROBLEMS:
        lines.append("          and more results that differ")
    if error is not None:
        said = (str(error).splitlines() or [""])[0]
        lines.append(f"raised    {type(error).__name__}: {said}")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if LEARNERS.search(frame.filename)]
        lines += [f"          {Path(frame.filename).name}, line {frame.lineno}: {frame.line}" for frame in frames[-1:]]
    if isinstance(error, RecursionError):
        lines.append("          Does your function call itself? The core's function of this name is yours while it is checked. And Python")
        lines.append("          nests about a thousand calls: a recursion as deep as a list is long breaks on a long one. Use a loop.")
    return lines + [f"says      {case.source}"]
