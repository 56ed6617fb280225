"""The checks of chapter 04's repairs: a repaired program loses, repeats and averages what the right one does.

Weights, steps, sizes and orders differ from what the programs print, so that no repair can aim at what it sees. The disk of b is the right
program's own, whatever a repair makes of its copy. Tolerance: sums in another order move a float by some 1e-15 of its largest summand.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-12}


def right(letter: str) -> Any:
    return read_module(hunts()[f"04.hunt.{letter}"].solution_file)


def case(title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict]) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case("property", title, lambda: given, expected, "the right program", observe, **NEAR)


def floats(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


# a: orders of the parameters before and after, by name.


def order_case(title: str, first: str, second: str, before: int, after: int, seed: int) -> Case:
    def figures(program: Any) -> dict[str, Any]:
        weights, targets = right("a").example(seed, sorted(first), 4)
        losses, trained = program.resumed_run(weights, targets, before, after, list(first), list(second))
        return {"losses": floats(losses)} | {f"weight {name}": floats(trained[name]) for name in sorted(trained)}

    return case(title, "a", {"first order": first, "second order": second, "steps before": before, "steps after": after}, figures)


def sizes_case() -> Case:
    """Parameters of several sizes. One is new to the optimizer's order, which is longer now: it begins without a velocity."""

    def figures(program: Any) -> dict[str, Any]:
        weights, targets = {"a": [1.0], "b": [2.0, 3.0], "c": [4.0, 5.0, 6.0]}, {"a": [0.0], "b": [1.0, 0.0], "c": [0.0, 0.0, 2.0]}
        losses, trained = program.resumed_run(weights, targets, 3, 4, ["c", "a"], ["a", "b", "c"])
        return {"losses": floats(losses)} | {f"weight {name}": floats(trained[name]) for name in sorted(trained)} | {"given": weights}

    return case("parameters of several sizes", "a", {"first order": "c a", "second order": "a b c"}, figures)


# b: what a power cut leaves, by the right program's disk.


def cuts_case(title: str, steps: list[int], keep: int) -> Case:
    def observe(program: Any, **_: Any) -> dict[str, Any]:
        sound, disk, found = right("b").sound, right("b").Disk(), {}
        for number, step in enumerate(steps):
            disk.cuts.clear()
            program.save(disk, step, keep)
            allowed = {steps[number - 1] if number else 0, step}
            newest = {max(sound(files), default=0) for files in disk.cuts}
            fewest = min(len(list(sound(files))) for files in disk.cuts)
            found[f"save of {step}"] = {
                "during it": "the one before or the new one" if newest <= allowed else f"also {sorted(newest - allowed)}",
                "afterwards": sorted(disk.names) == [f"step-{each:06}" for each in steps[max(0, number + 1 - keep) : number + 1]],
                "fewer than before": fewest < min(number, keep),
            }
            disk.cuts.clear()
            disk.cut()
            found[f"save of {step}"]["newest after it"] = sorted({max(sound(files), default=0) for files in disk.cuts})
        return found

    def expected(**_: Any) -> dict[str, Any]:
        fine = {"during it": "the one before or the new one", "afterwards": True, "fewer than before": False}
        return {f"save of {step}": fine | {"newest after it": [step]} for step in steps}

    given = {"steps": steps, "keep": keep, "power": "cut at each moment"}
    return Case("property", title, lambda: given, expected, "a power cut leaves the checkpoint before or the new one", observe)


# c: logs at several intervals.


def logs_case(title: str, count: int, longest: int, log_every: int, seed: int) -> Case:
    steps = right("c").example(seed, count, longest)

    def figures(program: Any) -> dict[str, Any]:
        logs = list(program.run(steps, log_every))
        found = {"steps": [step for step, _, _ in logs], "tokens": [int(tokens) for _, _, tokens in logs]}
        return found | {"means": floats(mean for _, mean, _ in logs), "whole": floats([program.whole_loss(steps, log_every)])}

    return case(title, "c", {"steps": count, "longest text": longest, "log_every": log_every}, figures)


def example_case() -> Case:
    steps = [[[[4.0], [1.0, 1.0, 1.0]]], [[[2.0]]], [[[3.0, 5.0]], [[1.0]]]]

    def figures(program: Any) -> dict[str, Any]:
        return {"logs": floats(value for log in program.run(steps, 2) for value in log)}

    return case("texts of 1 and 3 tokens", "c", {"losses of the tokens": steps, "log_every": 2}, figures)


# d: stops at several steps.


def stops_case(title: str, steps: int, peak: float, warm_up: int, stops: list[int]) -> Case:
    def figures(program: Any) -> dict[str, Any]:
        weight, used = program.train(steps, peak, warm_up, stops)
        return {"weight": floats([weight]), "rates": floats(used)}

    return case(title, "d", {"steps": steps, "peak": peak, "warm_up": warm_up, "resumed after": stops}, figures)


CASES = {
    "a": (
        order_case("the same order", "abc", "abc", 5, 5, 11),
        order_case("the other way round", "abcd", "dcba", 7, 6, 12),
        order_case("two are exchanged", "pqrst", "qprst", 4, 8, 13),
        order_case("saved before the first step", "ab", "ba", 0, 5, 14),
        sizes_case(),
    ),
    "b": (
        cuts_case("one stays", [1, 2, 3], 1),
        cuts_case("two stay", [10, 20, 30, 40], 2),
        cuts_case("three stay, of two", [5, 7], 3),
    ),
    "c": (
        example_case(),
        logs_case("a log for each step", 9, 40, 1, 31),
        logs_case("logs of four steps, and one that is left", 13, 25, 4, 32),
        logs_case("texts of one length", 6, 1, 3, 33),
        logs_case("one log", 10, 80, 100, 34),
    ),
    "d": (
        stops_case("never", 12, 0.5, 3, []),
        stops_case("after the first step", 12, 0.5, 3, [1]),
        stops_case("in the warm-up and after it", 15, 0.2, 5, [2, 4, 5, 6, 11]),
        stops_case("after each step", 9, 0.4, 2, list(range(1, 10))),
    ),
}
STAGES = {letter: Check(f"04.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
