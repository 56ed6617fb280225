"""The checks of chapter 01's repairs: a repaired program has the losses, counts, weights and letters of the right one.

Data, sizes and seeds differ from what the programs print, so that no repair can aim at what it sees. Tolerance: micro-batches add float64
numbers up in another order, which moves a sum by some 1e-15 of its largest summand; 1e-9 is far from that and from any mistake. A repair
of `a` may weigh by a share of two counts, which PyTorch divides in float32: 1e-7 of it, so 1e-5 is allowed there.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-9}


def right(letter: str) -> Any:
    return read_module(hunts()[f"01.hunt.{letter}"].solution_file)


def case(title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict]) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case("property", title, lambda: given, expected, "the right program", observe, **NEAR)


def rows_case(title: str, lengths: list[int], size: int, steps: int, rate: float, seed: int) -> Case:
    """lengths: how many targets of each row count."""
    inputs, targets, scores = right("a").example(seed, lengths, 9)

    def figures(program: Any, size: int = size) -> dict[str, Any]:
        losses, trained = program.train(inputs.clone(), targets.clone(), scores.clone(), size, steps, rate)
        return {"losses": torch.tensor(losses).double(), "scores": trained}

    given = {"targets that count in each row": lengths, "rows in a micro-batch": size, "steps": steps}
    expected, observe = lambda **_: figures(right("a"), len(lengths)), lambda program, **_: figures(program)  # noqa: E731
    return Case("property", title, lambda: given, expected, "the right program without micro-batches", observe, rtol=1e-5, atol=1e-6)


def judged_case(title: str, steps: int, judge_every: int, rate: float, seed: int) -> Case:
    data, held_out = right("b").example(seed, 20), right("b").example(seed + 50, 30)

    def figures(program: Any) -> dict[str, Any]:
        losses, judged, dropped, weights = program.train(data, held_out, seed, steps, judge_every, rate)
        found = {"losses": torch.tensor(losses).double(), "held-out losses": torch.tensor(judged).double()}
        return found | {"steps with dropout": dropped} | weights

    return case(title, "b", {"steps": steps, "judged every": judge_every, "dropout": rate}, figures)


def letters_case(title: str, size: int, temperature: float, top_k: int, seed: int) -> Case:
    table = right("c").example(seed, size)

    def figures(program: Any) -> dict[str, Any]:
        return {"letters": program.write(table.clone(), seed % size, 60, temperature, top_k, seed)}

    return case(title, "c", {"letters": size, "temperature": temperature, "top_k": top_k}, figures)


CASES = {
    "a": (
        rows_case("one micro-batch", [3, 9, 5], 3, 3, 0.5, 11),
        rows_case("even micro-batches", [4, 4, 4, 4], 2, 3, 0.5, 12),
        rows_case("uneven micro-batches", [9, 1, 2, 9, 8, 1], 2, 5, 1.0, 13),
        rows_case("rows that are left", [9, 1, 2, 9, 5], 3, 4, 1.0, 14),
        rows_case("one row each", [1, 9, 7, 2], 1, 4, 0.7, 15),
    ),
    "b": (
        judged_case("never judged", 6, 100, 0.5, 21),
        judged_case("judged at the end", 6, 6, 0.5, 22),
        judged_case("judged after each step", 9, 1, 0.5, 23),
        judged_case("judged now and then", 12, 5, 0.3, 24),
    ),
    "c": (
        letters_case("temperature 1", 6, 1.0, 6, 31),
        letters_case("a low temperature", 9, 0.2, 9, 32),
        letters_case("a high temperature", 7, 4.0, 7, 33),
        letters_case("the likeliest three", 8, 2.5, 3, 34),
        letters_case("the likeliest one", 8, 2.5, 1, 35),
    ),
}
STAGES = {letter: Check(f"01.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
