"""The checks of chapter 06's repairs: ranks compute what the right program computes in one process, and send no more than it.

Sizes, seeds and numbers differ from those that the programs print, so that no repair can aim at what it sees. Tolerance: ranks add the same
numbers in another order, which moves float64 by some 1e-15 of the largest summand; 1e-9 is far from that and from any mistake.
"""

from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check
from shared.parallel.comm.threads import run_threads

NEAR = {"rtol": 1e-9, "atol": 1e-9}
ONE_PROCESS = "the right program in one process"
TRACE = "the communication trace of the right program"


def right(letter: str) -> Any:
    return read_module(hunts()[f"06.hunt.{letter}"].solution_file)


def parts(value: Any) -> dict[str, torch.Tensor]:
    """The results of one rank, by name."""
    if isinstance(value, dict):
        return value
    losses, table = value if isinstance(value, tuple) else ([], value)
    return {"weights": table} | ({"losses": torch.tensor(losses).double()} if losses else {})


def train_case(letter: str, title: str, ranks: int, given: tuple, *settings: Any) -> Case:
    """`train` on every rank, against the right program on one."""
    alone = [1, *settings[1:]] if letter == "a" else list(settings)  # a: one micro-batch in one process

    def named(results: list[Any]) -> dict[str, Any]:
        return {f"{name} on rank {rank}": value for rank, result in enumerate(results) for name, value in parts(result).items()}

    def expected(**_: Any) -> dict[str, Any]:
        program = right(letter)
        if letter == "d":
            return named([direct(given, *settings)] * ranks)
        return named(run_threads(program.train, 1, *given, *alone) * ranks)

    observe = lambda program, **_: named(run_threads(program.train, ranks, *given, *settings))  # noqa: E731
    return Case("two ranks", title, lambda: {"ranks": ranks, "settings": list(settings)}, expected, ONE_PROCESS, observe, **NEAR)


def direct(given: tuple, steps: int, rate: float) -> torch.Tensor:
    """d in one process, which has no machines of two ranks."""
    inputs, wanted = given
    weight = torch.zeros(inputs.shape[1], dtype=inputs.dtype)
    for _ in range(steps):
        weight -= rate * inputs.T @ (inputs @ weight - wanted) / len(inputs)
    return weight


def sent_case(letter: str, ranks: int, given: tuple, *settings: Any) -> Case:
    """Calls and bytes of all ranks together are not more than the right program's."""
    names = "more calls than the right program's, of all ranks", "more bytes, of all ranks"

    def sent(program: Any) -> list[int]:
        def run(world: Any) -> tuple[int, int]:
            program.train(world, *given, *settings)
            return sum(world.trace.calls().values()), sum(world.trace.bytes().values())

        return [sum(column) for column in zip(*run_threads(run, ranks), strict=True)]

    def observe(program: Any, **_: Any) -> dict[str, int]:
        return {name: max(0, mine - least) for name, mine, least in zip(names, sent(program), sent(right(letter)), strict=True)}

    expected = lambda **_: dict.fromkeys(names, 0)  # noqa: E731
    return Case("budget", "what is sent", lambda: {"ranks": ranks}, expected, TRACE, observe)


def rows_case(ranks: int) -> Case:
    """`reduced` of d, on tensors of several numbers."""
    tensor = torch.randn(ranks, 5, generator=torch.Generator().manual_seed(ranks), dtype=torch.float64)
    expected = lambda **_: {f"rank {rank}": tensor.sum(dim=0) for rank in range(ranks)}  # noqa: E731
    observe = lambda program, **_: {f"rank {r}": found for r, found in enumerate(run_threads(program.reduced, ranks, tensor))}  # noqa: E731
    return Case("two ranks", f"the sum on {ranks} ranks", lambda: {"ranks": ranks}, expected, "torch.sum", observe, **NEAR)


A, B, C, D = (right(letter).example(20 + place) for place, letter in enumerate("abcd"))
ODD = right("c").example(31, rows=9, length=7, vocabulary=4)
CASES = {
    "a": (
        train_case("a", "one micro-batch on each of two ranks", 2, A, 1, 7, 0.11),
        train_case("a", "three micro-batches on each of two ranks", 2, A, 3, 7, 0.11),
        train_case("a", "two micro-batches of unequal sizes, five ranks", 5, right("a").example(25, rows=37), 2, 5, 0.07),
        train_case("a", "four micro-batches in one process", 1, A, 4, 7, 0.11),
        sent_case("a", 2, A, 3, 4, 0.1),
    ),
    "b": (
        train_case("b", "two ranks", 2, B, 6, 0.15, 5),
        train_case("b", "three ranks with unequally many rows", 3, B, 6, 0.15, 6),
        train_case("b", "one process", 1, B, 6, 0.15, 5),
        sent_case("b", 2, B, 4, 0.1, 5),
    ),
    "c": (
        train_case("c", "two ranks", 2, C, 5, 9, 1.3),
        train_case("c", "four ranks", 4, C, 5, 9, 1.3),
        train_case("c", "three ranks, other texts", 3, ODD, 4, 8, 0.9),
        train_case("c", "one process", 1, C, 5, 9, 1.3),
        sent_case("c", 4, C, 5, 4, 1.0),
    ),
    "d": (
        rows_case(2),
        rows_case(4),
        rows_case(8),
        train_case("d", "gradient descent on four ranks", 4, D, 9, 0.2),
        train_case("d", "gradient descent on six ranks", 6, D, 9, 0.2),
        sent_case("d", 6, D, 3, 0.2),
    ),
}
STAGES = {letter: Check(f"06.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
