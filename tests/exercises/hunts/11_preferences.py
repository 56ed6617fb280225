"""The checks of chapter 11's repairs: a repaired program has the losses, counts and weights of the right one.

Pairs, rewards, sizes and seeds differ from what the programs print, so that no repair can aim at what it sees. Tolerance: micro-batches add
float64 numbers up in another order, which moves a sum by some 1e-15 of its largest summand; 1e-9 is far from that and from any mistake.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-9}


def right(letter: str) -> Any:
    return read_module(hunts()[f"11.hunt.{letter}"].solution_file)


def case(stage: str, title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict]) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case(stage, title, lambda: given, expected, "the right program", observe, **NEAR)


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A program that changes what it was given must not change it for the other one."""
    return {name: part.clone() for name, part in weights.items()}


# a: pairs of answers of one length, and of two.


def pairs_case(title: str, lengths: list[tuple[int, int]], beta: float, seed: int) -> Case:
    """lengths: of the chosen and of the rejected answer of each pair."""
    drawn, weights = right("a").example(seed, [max(each) for each in lengths])
    pairs = [(prompt, chosen[:a], rejected[:b]) for (prompt, chosen, rejected), (a, b) in zip(drawn, lengths, strict=True)]

    def figures(program: Any) -> dict[str, Any]:
        losses, trained = program.train(pairs, copied(weights), beta, 5, 0.3)
        return {"losses": torch.tensor(losses).double(), **trained}

    return case("pairs", title, "a", {"pairs": pairs, "beta": beta}, figures)


# b: several steps, in micro-batches of any size.


def reference_case(title: str, pairs: int, steps: int, size: int, beta: float, seed: int) -> Case:
    given, weights = right("b").example(seed, pairs)

    def figures(program: Any) -> dict[str, Any]:
        losses, lengths, trained = program.train(given, copied(weights), beta, steps, 0.7, size)
        return {"losses": torch.tensor(losses).double(), "lengths of the gradients": torch.tensor(lengths).double(), **trained}

    return case("steps", title, "b", {"pairs": pairs, "steps": steps, "micro-batch": size, "beta": beta}, figures)


# c: micro-batches of several sizes, compared with the right program's without any.


def slices_case(title: str, count: int, size: int, updates: int, seed: int) -> Case:
    answers, rewards, logits = right("c").example(seed, count)

    def figures(program: Any, size: int) -> dict[str, Any]:
        losses, trained = program.train(answers, rewards, logits.clone(), size, updates, 0.4)
        return {"losses": torch.tensor(losses).double(), "logits": trained}

    given = {"answers": count, "micro-batch": size, "updates": updates}
    expected, observe = lambda **_: figures(right("c"), count), lambda program, **_: figures(program, size)  # noqa: E731
    return Case("slices", title, lambda: given, expected, "the right program without slices", observe, **NEAR)


# d: one update, and several.


def updates_case(title: str, count: int, updates: int, clip: float, rate: float, seed: int) -> Case:
    prompts, answers, advantages, weights = right("d").example(seed, count)

    def figures(program: Any) -> dict[str, Any]:
        losses, shares, trained = program.learn(prompts, answers, advantages, copied(weights), updates, clip, rate)
        found = {"losses": torch.tensor(losses).double(), "shares of clipped answers": torch.tensor(shares).double()}
        return found | trained

    return case("updates", title, "d", {"answers": count, "updates": updates, "clip": clip}, figures)


CASES = {
    "a": (
        pairs_case("answers of one word", [(1, 1), (1, 1)], 0.5, 11),
        pairs_case("answers of one length", [(5, 5), (5, 5)], 0.1, 12),
        pairs_case("chosen answers are longer", [(7, 2), (3, 1)], 0.5, 13),
        pairs_case("several lengths, also no word", [(0, 4), (9, 3), (2, 6)], 0.3, 14),
    ),
    "b": (
        reference_case("one step", 6, 1, 6, 0.5, 21),
        reference_case("two steps", 6, 2, 6, 0.5, 22),
        reference_case("seven steps in micro-batches of 2", 8, 7, 2, 1.0, 23),
        reference_case("micro-batches of different sizes", 7, 5, 3, 0.2, 24),
    ),
    "c": (
        slices_case("no slices", 20, 20, 3, 31),
        slices_case("slices of half", 20, 10, 3, 32),
        slices_case("slices of different sizes", 23, 5, 2, 33),
        slices_case("one answer each", 12, 1, 2, 34),
    ),
    "d": (
        updates_case("one update", 24, 1, 0.2, 0.5, 41),
        updates_case("two updates", 24, 2, 0.2, 0.5, 42),
        updates_case("nine updates, which are clipped", 32, 9, 0.2, 1.0, 43),
        updates_case("a narrow clip", 32, 6, 0.05, 0.5, 44),
    ),
}
STAGES = {letter: Check(f"11.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
