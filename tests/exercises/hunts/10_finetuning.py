"""The checks of chapter 10's repairs: a repaired program has the losses, counts, weights and outputs of the right one.

Chats, sizes, seeds and scales differ from what the programs print, so that no repair can aim at what it sees. Tolerance: ranks add float64
numbers up in another order, which moves a sum by some 1e-15 of its largest summand; 1e-9 is far from that and from any mistake.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check
from shared.parallel.comm.threads import run_threads

NEAR = {"rtol": 1e-9, "atol": 1e-9}


def right(letter: str) -> Any:
    return read_module(hunts()[f"10.hunt.{letter}"].solution_file)


def case(stage: str, title: str, letter: str, given: dict[str, Any], figures: Callable[..., dict], *inputs: Any) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter), *inputs), lambda program, **_: figures(program, *inputs)  # noqa: E731
    return Case(stage, title, lambda: given, expected, "the right program", observe, **NEAR)


def trained(found: tuple[list[float], list[int], dict[str, torch.Tensor]]) -> dict[str, Any]:
    losses, counted, weights = found
    return {"tokens that count": counted, "losses": torch.tensor(losses).double(), **weights}


# a: chats of any number of turns, also ones that begin or end with another role.


def chat_case(title: str, roles: list[list[str]], seed: int) -> Case:
    _, weights = right("a").example(seed, 1)
    random = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(3, 12, (int(torch.randint(1, 5, (), generator=random)),), generator=random).tolist()  # noqa: E731
    chats = [[(role, draw()) for role in of_chat] for of_chat in roles]
    return case("chats", title, "a", {"chats": chats}, lambda program: trained(program.train(chats, weights, 3, 0.5)))


# b: any rank and alpha, before a merge, after it, and merged in part.


def merge_case(title: str, rank: int, alpha: float, changes: list[str], seed: int) -> Case:
    """changes: after the training, such as "merge 0": the change and the layer."""

    def figures(program: Any) -> dict[str, Any]:
        layers, x, y = program.example(seed, rank, alpha, (4, 6, 5, 3))
        losses = program.train(layers, x, y, 4, 0.1)
        found: dict[str, Any] = {"losses": torch.tensor(losses).double(), "outputs when trained": program.network(x, layers)}
        for number, change in enumerate(changes):
            what, layer = change.split()
            getattr(program, what)(layers[int(layer)])
            found[f"outputs after change {number}, {change}"] = program.network(x, layers)
            found[f"weight after change {number}"] = layers[int(layer)]["weight"]
        return found

    return case("merge", title, "b", {"rank": rank, "alpha": alpha, "changes": changes}, figures)


# c: tensor-parallel ranks.


def factors_case(title: str, ranks: int, inner: int, rank: int, scaling: float, steps: int, seed: int) -> Case:
    given = right("c").example(seed, inner, rank)

    def figures(program: Any) -> dict[str, Any]:
        found = {}
        for number, (losses, factors, gradients) in enumerate(run_threads(program.train, ranks, *given, scaling, steps, 0.1)):
            found[f"losses on rank {number}"] = torch.tensor(losses).double()
            found |= {f"{name} on rank {number}": part for name, part in factors.items()}
            found |= {f"gradient of {name} on rank {number}": part for name, part in gradients.items()}
        return found

    def alone() -> dict[str, Any]:
        """Cut from one process's, of the right program."""
        losses, factors, gradients = run_threads(right("c").train, 1, *given, scaling, steps, 0.1)[0]
        cut, found = right("c").CUT, {}
        for number in range(ranks):
            own = lambda name, part, number=number: part.chunk(ranks, dim=cut[name])[number] if name in cut else part  # noqa: E731
            found[f"losses on rank {number}"] = torch.tensor(losses).double()
            found |= {f"{name} on rank {number}": own(name, part) for name, part in factors.items()}
            found |= {f"gradient of {name} on rank {number}": own(name, part) for name, part in gradients.items()}
        return found

    sizes = {"ranks": ranks, "inner size": inner, "rank of the factors": rank, "steps": steps}
    observe = lambda program, **_: figures(program)  # noqa: E731
    return Case("two ranks", title, lambda: sizes, lambda **_: alone(), "the right program in one process", observe, **NEAR)


# d: rows of any lengths, and what is written after training.


def batch_case(title: str, examples: list[tuple[list[int], list[int]]], seed: int) -> Case:
    _, weights = right("d").example(seed)

    def figures(program: Any) -> dict[str, Any]:
        ids, targets = program.batch_of(examples)
        found = trained(program.train(examples, weights, 40, 1.0))
        written = [program.write(prompt, {name: found[name] for name in weights}, 9) for prompt, _ in examples]
        counted = torch.where(targets == -100, 0, 1)  # and which ids fill a row up is open
        return found | {"targets that count": targets * counted, "written": written}

    return case("rows", title, "d", {"prompts and answers": examples}, figures)


U, A = "user", "assistant"
CASES = {
    "a": (
        chat_case("one turn each", [[U, A], [U, A]], 11),
        chat_case("two turns each", [[U, A, U, A], [U, A, U, A]], 12),
        chat_case("different numbers of turns", [[U, A], [U, A, U, A, U, A], [U, A, U]], 13),
        chat_case("an answer first, and two after one another", [[A, U, A, A], [U, U, A]], 14),
    ),
    "b": (
        merge_case("alpha equals the rank", 3, 3.0, ["merge 0", "merge 1", "merge 2"], 21),
        merge_case("alpha is twice the rank", 3, 6.0, ["merge 0", "merge 1", "merge 2"], 22),
        merge_case("alpha is below the rank, and taken out again", 4, 1.0, ["merge 1", "unmerge 1", "unmerge 1", "merge 1", "merge 1"], 23),
        merge_case("rank 1", 1, 5.0, ["merge 2", "merge 0", "unmerge 2"], 24),
    ),
    "c": (
        factors_case("one process", 1, 6, 2, 0.5, 2, 31),
        factors_case("two ranks, one step", 2, 6, 2, 1.0, 1, 32),
        factors_case("two ranks, three steps", 2, 10, 3, 1.7, 3, 33),
        factors_case("four ranks, three steps", 4, 12, 2, 0.6, 3, 34),
    ),
    "d": (
        batch_case("one length", [([5], [4, 3]), ([7, 5], [4])], 41),
        batch_case("different lengths", [([5], [4, 3, 2, 9, 9]), ([7, 5], [4]), ([11], [])], 42),
        batch_case("end tokens within a prompt", [([0, 6], [5, 4]), ([3, 0], [2, 2, 2, 2]), ([0], [7])], 43),
    ),
}
STAGES = {letter: Check(f"10.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
