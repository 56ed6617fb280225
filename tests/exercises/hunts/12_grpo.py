"""The checks of chapter 12's repairs: a repaired program has the losses, ratios and weights of the right one.

Policies, sizes, rates and seeds differ from what the programs print, so that no repair can aim at what it sees. Tolerance: sums in another
order move float64 numbers by some 1e-15 of the largest summand; 1e-9 is far from that and from any mistake.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-9}


def right(letter: str) -> Any:
    return read_module(hunts()[f"12.hunt.{letter}"].solution_file)


def case(stage: str, title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict]) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case(stage, title, lambda: given, expected, "the right program", observe, **NEAR)


def policy_case(title: str, steps: int, beta: float, rate: float, seed: int) -> Case:
    """a: with a penalty and without, a step and several."""
    reference, rewards = right("a").example(seed)

    def figures(program: Any) -> dict[str, Any]:
        seen, logits = program.train(reference.clone(), rewards.clone(), steps, beta, rate, seed + 1)
        return {"losses": torch.tensor(seen).double(), "logits": logits}

    return case("steps", title, "a", {"steps": steps, "beta": beta, "rate": rate}, figures)


def ranks_case(title: str, steps: int, answers: int, rate: float, seed: int) -> Case:
    """b: losses and weights of both ranks."""

    def figures(program: Any) -> dict[str, Any]:
        found = {}
        for rank, (losses, weights) in enumerate(program.train(steps, answers, rate, seed)):
            found |= {f"losses of rank {rank}": torch.tensor(losses).double()}
            found |= {f"{name} of rank {rank}": part for name, part in weights.items()}
        return found

    return case("ranks", title, "b", {"steps": steps, "answers": answers}, figures)


def temperature_case(title: str, rollouts: int, count: int, temperature: float, rate: float, seed: int) -> Case:
    """c: ratios, clipped shares and logits at several temperatures."""
    logits = right("c").example(seed)

    def figures(program: Any) -> dict[str, Any]:
        means, shares, trained = program.learn(logits.clone(), rollouts, count, temperature, rate, seed + 1)
        return {"mean ratios": torch.tensor(means).double(), "clipped shares": torch.tensor(shares).double(), "logits": trained}

    return case("rollouts", title, "c", {"rollouts": rollouts, "temperature": temperature}, figures)


def ends_case(title: str, steps: int, rate: float, seed: int, moved: float = 0.0) -> Case:
    """d: lengths and logits. moved: added to the logit of the end."""
    logits = right("d").example(seed)
    logits[:, right("d").END] += moved

    def figures(program: Any) -> dict[str, Any]:
        seen, trained = program.train(logits.clone(), steps, rate, seed + 1)
        return {"mean lengths": torch.tensor(seen).double(), "logits": trained}

    return case("steps", title, "d", {"steps": steps, "rate": rate}, figures)


CASES = {
    "a": (
        policy_case("one step without a penalty", 1, 0.0, 0.3, 11),
        policy_case("one step with a penalty", 1, 0.4, 0.3, 12),
        policy_case("six steps", 6, 0.2, 0.7, 13),
        policy_case("four steps with a small penalty", 4, 0.01, 1.5, 14),
    ),
    "b": (
        ranks_case("one step", 1, 9, 0.3, 21),
        ranks_case("two steps", 2, 9, 0.3, 22),
        ranks_case("seven steps", 7, 12, 0.5, 23),
    ),
    "c": (
        temperature_case("temperature 1", 2, 17, 1.0, 1.0, 31),
        temperature_case("temperature 0.7", 3, 17, 0.7, 1.0, 32),
        temperature_case("temperature 1.6", 3, 19, 1.6, 2.0, 33),
        temperature_case("temperature 0.4, one rollout", 1, 23, 0.4, 1.0, 34),
    ),
    "d": (
        ends_case("one step", 1, 0.5, 41),
        ends_case("six steps", 6, 1.0, 42),
        ends_case("a policy that ends often", 5, 1.0, 43, moved=2.5),
        ends_case("a policy that hardly ever ends", 4, 1.0, 44, moved=-3.0),
    ),
}
STAGES = {letter: Check(f"12.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
