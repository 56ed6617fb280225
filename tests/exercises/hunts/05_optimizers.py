"""The checks of chapter 05's repairs: a repaired program has the rates, norms and weights of the right one.

Sizes, numbers of groups, scales and seeds differ from what the programs print, so that no repair can aim at what it sees. Tolerance:
products and sums in another order move float64 by some 1e-15, and Newton-Schulz multiplies that by a few hundred; 1e-9 is far from both.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-10}


def right(letter: str) -> Any:
    return read_module(hunts()[f"05.hunt.{letter}"].solution_file)


def case(stage: str, title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict]) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case(stage, title, lambda: given, expected, "the right program", observe, **NEAR)


# a: experts with gradients of one size, and of many.


def experts_case(title: str, sizes: list[float], rows: int, columns: int, steps: int, seed: int) -> Case:
    gradients = [right("a").example(seed + step, sizes, rows, columns) for step in range(steps)]

    def figures(program: Any) -> dict[str, Any]:
        return {"weights": program.train(torch.ones_like(gradients[0]), [each.clone() for each in gradients], 0.3)}

    return case("experts", title, "a", {"sizes of gradients": sizes, "rows": rows, "columns": columns, "steps": steps}, figures)


# b: groups of several sizes, one step and many, with decay and without.


def groups_case(title: str, sizes: list[int], steps: int, decay: float, seed: int) -> Case:
    weights, gradients = right("b").example(seed, sum(sizes), steps)

    def figures(program: Any) -> dict[str, Any]:
        trained = program.train([each.clone() for each in weights], gradients, sizes, 0.05, decay)
        return {f"tensor {number}": each for number, each in enumerate(trained)}

    return case("groups", title, "b", {"groups of": sizes, "steps": steps, "decay": decay}, figures)


# c: loss scales, with norms above max_norm and below it.


def scale_case(title: str, scale: float, max_norm: float, steps: int, seed: int) -> Case:
    weights, inputs, targets = right("c").example(seed, 12)

    def figures(program: Any) -> dict[str, Any]:
        norms, trained = program.train([each.clone() for each in weights], inputs, targets, scale, max_norm, steps, 0.1)
        return {"norms": torch.tensor(norms).double(), "first layer": trained[0], "second layer": trained[1]}

    return case("scales", title, "c", {"scale": scale, "max_norm": max_norm, "steps": steps}, figures)


# d: micro-batches of several sizes, also where the last is smaller.


def schedule_case(title: str, count: int, size: int, steps: int, seed: int) -> Case:
    weights, inputs, targets = right("d").example(seed, count)

    def figures(program: Any) -> dict[str, Any]:
        rates, trained = program.train(weights.clone(), inputs, targets, size, steps, 0.3)
        return {"learning rates": torch.tensor(rates).double(), "weights": trained}

    return case("schedule", title, "d", {"examples": count, "micro-batch": size, "steps": steps}, figures)


CASES = {
    "a": (
        experts_case("one expert", [2.0], 5, 3, 2, 11),
        experts_case("experts with equal gradients", [1.0, 1.0, 1.0, 1.0], 4, 7, 1, 12),
        experts_case("gradients of several sizes", [1.0, 0.05, 20.0], 6, 4, 3, 13),
        experts_case("a very small one, and zeros", [1.0, 1e-5, 0.0], 3, 5, 1, 14),
    ),
    "b": (
        groups_case("one group", [3], 4, 0.0, 21),
        groups_case("two groups, one step", [1, 2], 1, 0.0, 22),
        groups_case("three groups, seven steps", [2, 1, 3], 7, 0.0, 23),
        groups_case("groups that decay", [1, 1, 1], 5, 0.4, 24),
    ),
    "c": (
        scale_case("a scale of 1", 1.0, 0.5, 5, 31),
        scale_case("a scale of 8", 8.0, 0.5, 5, 32),
        scale_case("nothing is clipped", 256.0, 1000.0, 4, 33),
        scale_case("a scale below 1", 0.25, 0.7, 6, 34),
        scale_case("some steps are clipped", 4096.0, 1.5, 12, 35),
    ),
    "d": (
        schedule_case("one micro-batch", 18, 18, 10, 41),
        schedule_case("two micro-batches", 18, 9, 10, 42),
        schedule_case("five micro-batches, the last one smaller", 23, 5, 12, 43),
        schedule_case("one example each", 7, 1, 9, 44),
    ),
}
STAGES = {letter: Check(f"05.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
