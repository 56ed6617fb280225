"""The checks of chapter 08's repairs: a repaired pipeline computes what the right program computes in one process, and still runs 1F1B.

Sizes, seeds and numbers differ from those that the programs print, so that no repair can aim at what it sees. Tolerance: gradients of
micro-batches are added in another order, which moves float64 by some 1e-15 of the largest summand; 1e-9 is far from that and from any
mistake.
"""

import weakref
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check
from shared.parallel.comm.threads import run_threads

NEAR = {"rtol": 1e-9, "atol": 1e-9}
ONE_PROCESS = "the right program in one process"


def right(letter: str) -> Any:
    return read_module(hunts()[f"08.hunt.{letter}"].solution_file)


# a: micro-batches of equal and of unequal sizes.


def descent(results: list[tuple]) -> dict[str, Any]:
    layers, gradients = (torch.stack([layer for result in results for layer in result[place]]) for place in (1, 2))
    losses = {f"losses on rank {rank}": torch.tensor(result[0]).double() for rank, result in enumerate(results)}
    return losses | {"the last gradients": gradients, "weights": layers}


def descent_case(title: str, ranks: int, sizes: list[int], seed: int) -> Case:
    given = right("a").example(seed, layers=4, rows=sum(sizes))

    def expected(**_: Any) -> dict:
        found = descent(run_threads(right("a").train, 1, *given, [sum(sizes)], 3, 0.4))
        return found | {f"losses on rank {rank}": found["losses on rank 0"] for rank in range(ranks)}

    observe = lambda program, **_: descent(run_threads(program.train, ranks, *given, sizes, 3, 0.4))  # noqa: E731
    return Case("two ranks", title, lambda: {"ranks": ranks, "rows of each micro-batch": sizes}, expected, ONE_PROCESS, observe, **NEAR)


# b: a table at both ends.


def tied(results: list[tuple], ranks: int) -> dict[str, Any]:
    """Losses and tables by rank, and all layers. One process's results stand for those of all ranks."""
    by_rank = results * ranks if len(results) == 1 else results
    found = {f"losses on rank {rank}": torch.tensor(losses).double() for rank, (losses, _) in enumerate(by_rank)}
    found |= {f"table on rank {rank}": by_rank[rank][1]["table"] for rank in sorted({0, ranks - 1})}
    return found | {"layers": torch.cat([held["layers"] for _, held in results])}


def tied_case(title: str, ranks: int, microbatches: int, steps: int) -> Case:
    given = right("b").example(31, layers=4, vocabulary=13, rows=24)
    expected = lambda **_: tied(run_threads(right("b").train, 1, *given, 1, steps, 0.3), ranks)  # noqa: E731
    observe = lambda program, **_: tied(run_threads(program.train, ranks, *given, microbatches, steps, 0.3), ranks)  # noqa: E731
    sizes = {"ranks": ranks, "micro-batches": microbatches, "steps": steps}
    return Case("two ranks", title, lambda: sizes, expected, ONE_PROCESS, observe, **NEAR)


# c to e: one step of 1F1B.


def alone(letter: str, weights: torch.Tensor, inputs: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Loss and gradients of all layers in one process, by autograd."""
    layers = weights.clone().requires_grad_()
    hidden = inputs
    for layer in layers:
        hidden = (torch.relu if letter == "c" else torch.tanh)(hidden @ layer.T)
    loss = (hidden - wanted).square().sum() / (2 if letter == "c" else 1)
    loss.backward()
    return {"loss": loss.item(), "gradients": layers.grad}


class Watched:
    """One rank's world, which sees what a program keeps: the activations that it received, or sent where it is the first.

    most: of these, the most that lived at a time, at the beginning of any send or receive.
    """

    def __init__(self, world: Any):
        self.world, self.kept, self.most = world, [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def note(self, tensor: torch.Tensor, is_activation: bool) -> None:
        if is_activation:
            self.kept.append(weakref.ref(tensor))
        self.most = max(self.most, sum(reference() is not None for reference in self.kept))

    def send(self, tensor: torch.Tensor, to: int, **options: Any) -> Any:
        self.note(tensor, self.world.rank == 0)
        return self.world.send(tensor, to, **options)

    def receive(self, tensor: torch.Tensor, source: int, **options: Any) -> Any:
        self.note(tensor, source < self.world.rank)
        return self.world.receive(tensor, source, **options)


def before_the_first_gradient(world: Any) -> int:
    """How many activations a rank received before the first message came back to it."""
    received = [entry.peer < world.rank for entry in world.trace.entries if entry.operation == "receive"]
    return received.index(False) if False in received else 1


def pipelined(program: Any, given: tuple, ranks: int) -> tuple[list[tuple], list[int], list[int]]:
    """Of each rank: its results, its forward passes before its first backward pass, and how many activations lived at a time."""
    def run(world: Any) -> tuple:
        watched = Watched(world)
        return program.step(watched, *given), before_the_first_gradient(world), watched.most

    return tuple(zip(*run_threads(run, ranks), strict=True))


def step_case(letter: str, ranks: int, microbatches: int, layers: int | None = None) -> Case:
    given = right(letter).example(41, layers or ranks, microbatches)
    allowed = [min(microbatches, ranks - rank) for rank in range(ranks)]
    each = 2 * given[1][0].nbytes  # c keeps input and result of a micro-batch
    middle = slice(1, ranks - 1)  # the last rank always goes backward at once, and the first goes as far ahead as the others let it

    def expected(**_: Any) -> dict:
        found = alone(letter, *given) | {"forward passes before the first backward pass, ranks between the ends": allowed[middle]}
        if letter == "c":
            found |= {f"KB that rank {rank} says it kept too many": 0.0 for rank in range(ranks)}
            found |= {f"micro-batches that rank {rank} kept too many": 0 for rank in range(ranks)}
        return found

    def observe(program: Any, **_: Any) -> dict:
        results, ahead, lived = pipelined(program, given, ranks)
        gradients = [result[1] for result in results]
        found = {"loss": results[0][0], "gradients": torch.cat(gradients) if letter == "e" else torch.stack(gradients)}
        found["forward passes before the first backward pass, ranks between the ends"] = list(ahead[middle])
        if letter == "c":
            for rank in range(ranks):
                found[f"KB that rank {rank} says it kept too many"] = max(0, results[rank][2] - allowed[rank] * each) / 1024
                found[f"micro-batches that rank {rank} kept too many"] = max(0, lived[rank] - allowed[rank])
        return found

    title = f"{ranks} ranks, {microbatches} micro-batches"
    sizes = {"ranks": ranks, "micro-batches": microbatches}
    return Case("budget" if letter == "c" else "two ranks", title, lambda: sizes, expected, ONE_PROCESS, observe, **NEAR)


CASES = {
    "a": (
        descent_case("four micro-batches on two ranks", 2, [4, 4, 4, 4], 21),
        descent_case("micro-batches of different sizes on two ranks", 2, [5, 2, 9], 22),
        descent_case("micro-batches of different sizes on four ranks", 4, [3, 8, 1, 4], 23),
        descent_case("one micro-batch on two ranks", 2, [7], 24),
    ),
    "b": (
        tied_case("one step of two micro-batches on two ranks", 2, 2, 1),
        tied_case("three steps of three micro-batches on two ranks", 2, 3, 3),
        tied_case("three steps of four micro-batches on four ranks", 4, 4, 3),
        tied_case("one process", 1, 2, 2),
    ),
    "c": (step_case("c", 2, 5), step_case("c", 3, 7), step_case("c", 4, 3), step_case("c", 4, 9)),
    "d": (step_case("d", 2, 2), step_case("d", 2, 5), step_case("d", 3, 4), step_case("d", 4, 3), step_case("d", 5, 7)),
    "e": (step_case("e", 2, 3), step_case("e", 3, 5), step_case("e", 4, 6), step_case("e", 5, 9), step_case("e", 3, 4, layers=6)),
}
STAGES = {letter: Check(f"08.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
