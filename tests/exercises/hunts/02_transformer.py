"""The checks of chapter 02's repairs: a repaired program has the outputs, losses and weights of the right one.

Texts, sizes and seeds differ from what the programs print, so that no repair can aim at what it sees. Tolerance: the same float64 sums in
another order move by some 1e-15, and training makes that 1e-12; 1e-9 is far from that and from any mistake. In bfloat16 (b) tables that
were rounded after the angles were computed are right too, and move a score of size 8 by some 0.03; the mistake moves it by whole units.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-9}


def right(letter: str) -> Any:
    return read_module(hunts()[f"02.hunt.{letter}"].solution_file)


def case(stage: str, title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict], **tolerance: float) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case(stage, title, lambda: given, expected, "the right program", observe, **tolerance or NEAR)


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A program that changes what it was given must not change it for the other one."""
    return {name: part.clone() for name, part in weights.items()}


# a: attention by numbers of key-value heads, and the model with own heads beside it.


def heads_case(title: str, shared: int, positions: int, seed: int) -> Case:
    x, weights = right("a").example(seed, shared, positions)

    def figures(program: Any) -> dict[str, Any]:
        own = program.with_own_heads(copied(weights))
        return {"output": program.attention(x.clone(), copied(weights)), "key heads of its own": own["key"], "value heads": own["value"]}

    return case("property", title, "a", {"key-value heads": shared, "positions": positions}, figures)


# b: scores at many places, and angles in float32.


def places_case(title: str, places: list[int], distance: int, size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    query, key = (vector.to(dtype) for vector in right("b").example(seed, size))
    given = torch.tensor(places)

    def figures(program: Any) -> dict[str, Any]:
        queries, keys = query.expand(len(places), -1).clone(), key.expand(len(places), -1).clone()
        turned = program.rotated(queries, given.clone())
        found = program.scores(queries, keys, given.clone(), distance)
        return {"scores": found.float(), "turned": turned.float(), "dtype": str(turned.dtype)}

    shown = {"places": places, "distance": distance, "size": size, "dtype": str(dtype)}
    tolerance = {"rtol": 0.02, "atol": 0.12} if dtype != torch.float32 else {"rtol": 1e-3, "atol": 1e-3}
    return case("property", title, "b", shown, figures, **tolerance)


# c: logits and losses before training, and trained weights.


def letters_case(title: str, rows: int, columns: int, steps: int, seed: int) -> Case:
    ids, weights = right("c").example(seed, rows, columns)

    def figures(program: Any) -> dict[str, Any]:
        logits = program.predict(ids.clone(), copied(weights))
        losses, trained = program.train(ids.clone(), copied(weights), steps, 0.1)
        found = {"logits": logits, "by letter": program.loss_by_letter(ids.clone(), copied(weights))}
        return found | {"losses": torch.tensor(losses).double(), **{f"trained {name}": part.detach() for name, part in trained.items()}}

    return case("property", title, "c", {"rows": rows, "columns": columns, "steps": steps}, figures)


# d: training, saving and training again.


def saving_case(title: str, count: int, steps: int, again: int, seed: int) -> Case:
    pairs, embedding, middle = right("d").example(seed, count)

    def figures(program: Any) -> dict[str, Any]:
        model = program.new_model(embedding.clone(), middle.clone())
        losses = program.train(model, pairs.clone(), steps, 0.7)
        file = program.saved(model)
        second = program.loaded(file)
        later = program.train(second, pairs.clone(), again, 0.7)
        weights = {f"in the file: {name}": part.detach().clone() for name, part in file.items()}
        return {"losses": torch.tensor(losses).double(), "losses after loading": torch.tensor(later).double(), **weights}

    return case("property", title, "d", {"pairs": count, "steps": steps, "steps after loading": again}, figures)


CASES = {
    "a": (
        heads_case("own heads", 8, 7, 11),
        heads_case("one head for all", 1, 7, 12),
        heads_case("two heads", 2, 9, 13),
        heads_case("four heads", 4, 5, 14),
    ),
    "b": (
        places_case("near places", [0, 1, 2, 30], 3, 32, 21),
        places_case("far places", [255, 257, 1001, 9_999], 0, 32, 22),
        places_case("far places, some distance apart", [300, 5_001, 12_345], 5, 64, 23),
        places_case("in float32", [300, 5_001, 12_345], 5, 64, 24, torch.float32),
        places_case("in float16", [300, 2_049, 5_001], 2, 16, 25, torch.float16),
    ),
    "c": (
        letters_case("one step", 5, 7, 1, 31),
        letters_case("many steps", 12, 9, 20, 32),
        letters_case("two letters", 9, 2, 3, 33),
    ),
    "d": (
        saving_case("one step", 30, 1, 2, 41),
        saving_case("many steps", 60, 25, 10, 42),
        saving_case("saved before the first step", 20, 0, 5, 43),
    ),
}
STAGES = {letter: Check(f"02.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
