"""Floor 0. What a check is: cases from easy to hard, each an observation of the answer beside what an oracle expects.

A case makes fresh arguments, observes the function on them (its named results, or the exception that it raised) and
compares with what its source says. The first case that differs ends the check. What the answer did there is then looked
for among the mutants: an answer that does exactly what a known wrong answer does gets that mutant's sentence.
"""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.comparing import differences, flatten, written
from shared.course.outcome import FAIL, PASS, Outcome

RUNGS = ("shape and dtype", "worked example", "property", "oracle", "two ranks", "budget")

Observation = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One question to an answer.

    rung: which of RUNGS this case stands on; a check's cases climb in that order.
    title: what is asked, as a person would say it.
    given: makes the arguments anew, the same ones at each call.
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
    spoilt: where the harness spoils a right answer to see that the check notices: names of `outputs`, or
        "gradients of ARGUMENT", "update of ARGUMENT" for what the function leaves behind.
    forbidden: functions of torch that are the exercise itself.
    """

    exercise: str
    outputs: tuple[str, ...]
    cases: Sequence[Case]
    spoilt: tuple[str, ...]
    forbidden: tuple[str, ...] = ()
    seconds: float = 20.0


def run_check(check: Check, function: Callable, mutants: Mapping[str, Callable]) -> Outcome:
    """Climb a check's cases with `function`; `mutants` maps sentences of misconception to wrong answers."""
    began = time.perf_counter()
    outcome = Outcome(check.exercise, PASS, of=len(check.cases))
    if not check.cases:
        raise ValueError(f"The check of {check.exercise} has no cases: a check that cannot fail is a defect.")
    for case in check.cases:
        outcome.cases += 1
        observed, error = observe(check, case, function)
        problems = differences(case_expectation(case), observed, case.rtol, case.atol)
        if problems:
            outcome.state, outcome.rung, outcome.title = FAIL, case.rung, case.title
            outcome.problem = describe(case, problems, error)
            outcome.misconception = diagnose(check, case, function, observed, mutants)
            break
    outcome.seconds = time.perf_counter() - began
    return outcome


def case_expectation(case: Case) -> Observation:
    torch.manual_seed(0)
    return flatten(case.expected(**case.given()))


def observe(check: Check, case: Case, function: Callable) -> tuple[Observation, Exception | None]:
    """What `function` does on a case: its flattened results, or `raised`; and `changed` for arguments it spoilt."""
    torch.manual_seed(0)
    given = case.given()
    with Forbidden(check.forbidden) as calls:
        try:
            if case.observe is None:
                result, error = named(check, function(**given)), None
            else:
                result, error = case.observe(function, **given), None
        except Exception as raised:
            result, error = {"raised": type(raised).__name__}, raised
    result = flatten(result)
    for name, fresh in case.given().items():
        if name not in case.changes and differences(flatten(contents(fresh)), flatten(contents(given[name])), 0.0, 0.0):
            result[f"changed its argument {name}"] = True
    for called in sorted(calls.made):
        result[f"called torch's own {called}, which is what this exercise is to write"] = True
    return result, error


def named(check: Check, result: Any) -> Observation:
    if len(check.outputs) == 1:
        return {check.outputs[0]: result}
    if isinstance(result, tuple) and len(result) == len(check.outputs):
        return dict(zip(check.outputs, result, strict=True))
    return {"returned": written(result) if isinstance(result, Tensor) else f"{type(result).__name__}: {result!r}"[:200]}


def contents(value: Any) -> Any:
    """What must be the same in an argument after the call. Callables and generators are not looked into."""
    match value:
        case nn.Module():
            return dict(value.named_parameters()) | {"training": value.training}
        case dict():
            return {key: contents(item) for key, item in value.items()}
        case list() | tuple():
            return [contents(item) for item in value]
        case Tensor() | int() | float() | str() | None:
            return value
    return None


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
    given = [f"given     {name} = {written(value)}" for name, value in case.given().items() if shows(value)]
    lines = given + problems + [f"says      {case.source}"]
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        where = [frame for frame in frames if frame.filename.endswith("exercises.py")][-1:]
        lines.append(f"raised    {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        lines += [f"          exercises.py, line {frame.lineno}: {frame.line}" for frame in where]
        if isinstance(error, RecursionError):
            lines.append("          Does your function call itself? The core's function of this name is yours while it is checked.")
    return lines


def shows(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | str | list | tuple | dict) or value is None


def diagnose(check: Check, case: Case, function: Callable, observed: Observation, mutants: Mapping[str, Callable]) -> str:
    """The sentence of the one mutant that does what `function` does: on the failing case, and where several do, on all."""
    alike = {said: mutant for said, mutant in mutants.items() if same(observed, observe(check, case, mutant)[0], case)}
    for other in check.cases:
        if len(alike) < 2:
            break
        here = observe(check, other, function)[0]
        alike = {said: mutant for said, mutant in alike.items() if same(here, observe(check, other, mutant)[0], other)}
    return next(iter(alike), "") if len(alike) == 1 else ""


def same(left: Observation, right: Observation, case: Case) -> bool:
    return not differences(left, right, case.rtol, case.atol)
