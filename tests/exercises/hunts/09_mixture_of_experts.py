"""The checks of chapter 09's repairs: a repaired program has the losses, gradients and loads of the right one in one process.

Sizes, seeds and numbers differ from those that the programs print, so that no repair can aim at what it sees. Tolerance: tokens are added
up in another order, which moves float64 by some 1e-15 of the largest summand; 1e-9 is far from that and from any mistake.
"""

from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check
from shared.parallel.comm.threads import run_threads

NEAR = {"rtol": 1e-9, "atol": 1e-9}
ONE_PROCESS = "the right program in one process"


def right(letter: str) -> Any:
    return read_module(hunts()[f"09.hunt.{letter}"].solution_file)


# a: experts spread over ranks, and held by several.


def descent_run(results: list[tuple], spread: int) -> dict[str, Any]:
    """Losses, parameters and last gradients by rank; experts put together from `spread` ranks after one another."""
    found = {f"losses on rank {rank}": torch.tensor(losses).double() for rank, (losses, _, _) in enumerate(results)}
    for place, kind in ((1, ""), (2, "gradient of ")):
        for name in ("below", "router"):
            found |= {f"{kind}{name} on rank {rank}": result[place][name] for rank, result in enumerate(results)}
        for first in range(0, len(results), spread):
            ranks = results[first : first + spread]
            found[f"{kind}experts from rank {first} on"] = torch.cat([result[place]["experts"] for result in ranks])
    return found


def descent_case(title: str, ranks: int, spread: int, steps: int, seed: int) -> Case:
    given = right("a").example(seed, experts=8, tokens=40)

    def expected(**_: Any) -> dict:
        [one] = run_threads(right("a").train, 1, *given, 1, steps, 0.01)
        cut = [{**held, "experts": part} for held in one[1:] for part in held["experts"].chunk(spread)]
        return descent_run([(one[0], cut[rank % spread], cut[spread + rank % spread]) for rank in range(ranks)], spread)

    observe = lambda program, **_: descent_run(run_threads(program.train, ranks, *given, spread, steps, 0.01), spread)  # noqa: E731
    sizes = {"ranks": ranks, "experts over": spread, "steps": steps}
    return Case("two ranks", title, lambda: sizes, expected, ONE_PROCESS, observe, **NEAR)


# b: any routing, also one that leaves ranks without rows.


def alone(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """Square error and gradients of all experts in one process, by autograd."""
    held = {name: part.clone().requires_grad_() for name, part in weights.items()}
    hidden = torch.tanh(x @ held["below"].T)
    scores, chosen = (hidden @ held["router"].T).softmax(dim=-1).max(dim=-1)
    made = torch.tanh((held["experts"][chosen] @ hidden[..., None])[..., 0])
    loss = (made * scores[:, None] - y).square().sum()
    loss.backward()
    return {"loss": loss.item(), "rows": chosen.bincount(minlength=len(held["router"])).tolist()} | {n: p.grad for n, p in held.items()}


def routing_case(title: str, ranks: int, towards: list[int], seed: int) -> Case:
    """towards: how much more the router likes each expert. The last of what `below` makes is about 1 for all tokens."""
    weights, x, y = right("b").example(seed, ranks, 5 * ranks)
    x = torch.cat([x[:, :-1], torch.ones_like(x[:, -1:])], dim=-1)
    weights["below"][-1] = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0])
    weights["router"][:, -1] += torch.tensor(towards).double()
    expected = lambda **_: alone(weights, x, y)  # noqa: E731

    def observe(program: Any, **_: Any) -> dict:
        results = run_threads(program.step, ranks, weights, x, y)
        found = {"loss": results[0][0], "rows": results[0][1], "experts": torch.stack([each[2]["expert"] for each in results])}
        return found | {name: results[-1][2][name] for name in ("below", "router")}

    return Case("two ranks", title, lambda: {"ranks": ranks}, expected, ONE_PROCESS, observe, **NEAR)


# c: a step's rows in parts, of equal and of unequal sizes.


def balanced_case(title: str, sizes: list[list[int]], seed: int) -> Case:
    rows = sum(map(sum, sizes))
    given = right("c").example(seed, rows=rows)

    def run(program: Any, sizes: list[list[int]]) -> dict:
        results = run_threads(program.train, len(sizes), *given, sizes, 3, 0.5)
        errors, loads, weights = results[-1]
        return {"square errors": torch.tensor(errors).double(), "load": loads, **weights}

    given_sizes = {"rows of each micro-batch, by rank": sizes}
    expected, observe = lambda **_: run(right("c"), [[rows]]), lambda program, **_: run(program, sizes)
    return Case("two ranks", title, lambda: given_sizes, expected, ONE_PROCESS, observe, **NEAR)


# d: layers that are computed again, all of them or some. `checkpoint` may stop early when it computes a layer again; here it does not, so
# that no repair rests on where it stops.


def run_and_watch(program: Any, ranks: int, *options: Any) -> tuple[tuple, int]:
    """What rank 0 returns, and how many numbers its autograd keeps for backward passes; what is to be computed again keeps none here."""

    def run(world: Any) -> tuple[tuple, int]:
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
            return program.train(world, *options), sum(kept)

    with set_checkpoint_early_stop(False):
        return run_threads(run, ranks)[0]


def counted_case(title: str, ranks: int, microbatches: int, recompute: list[bool], seed: int) -> Case:
    given = right("d").example(seed, rows=24)

    def figures(found: tuple, too_many: bool) -> dict:
        losses, loads, biases = found
        return {"losses": torch.tensor(losses).double(), "load of each step": loads, "bias": biases, "keeps more than it must": too_many}

    def expected(**_: Any) -> dict:
        return figures(run_threads(right("d").train, 1, *given, 1, [False, False], 4)[0], too_many=False)

    def observe(program: Any, **_: Any) -> dict:
        found, kept = run_and_watch(program, ranks, *given, microbatches, recompute, 4)
        _, allowed = run_and_watch(right("d"), ranks, *given, microbatches, recompute, 4)
        return figures(found, too_many=kept > 1.2 * allowed)

    sizes = {"ranks": ranks, "micro-batches": microbatches, "layers computed again": recompute}
    return Case("two ranks", title, lambda: sizes, expected, ONE_PROCESS, observe, **NEAR)


CASES = {
    "a": (
        descent_case("two ranks, experts spread over both", 2, 2, 1, 21),
        descent_case("two ranks that each hold all experts", 2, 1, 2, 22),
        descent_case("four ranks, experts over two", 4, 2, 3, 23),
        descent_case("four ranks, experts over all", 4, 4, 2, 24),
        descent_case("one process", 1, 1, 2, 25),
    ),
    "b": (
        routing_case("each rank gets rows", 2, [0, 0], 32),
        routing_case("the second rank gets none", 2, [1, -1], 33),
        routing_case("the first rank gets none", 2, [-1, 1], 34),
        routing_case("one of three ranks gets them all", 3, [-1, 1, -1], 35),
        routing_case("the middle one of three ranks gets none", 3, [0, -2, 0], 43),
        routing_case("one process", 1, [0], 36),
    ),
    "c": (
        balanced_case("one rank, three micro-batches", [[4, 4, 4]], 41),
        balanced_case("two ranks, one micro-batch each", [[5], [5]], 42),
        balanced_case("micro-batches of different sizes", [[1, 6, 2]], 43),
        balanced_case("two ranks with different numbers of rows", [[3, 2], [1, 5]], 44),
        balanced_case("one rank, one micro-batch", [[6]], 45),
    ),
    "d": (
        counted_case("every layer is computed again", 1, 1, [True, True], 51),
        counted_case("one layer of two is computed again, in two micro-batches", 1, 2, [False, True], 52),
        counted_case("two ranks, three micro-batches, the first layer computed again", 2, 3, [True, False], 53),
        counted_case("no layer is computed again, in two micro-batches", 2, 2, [False, False], 54),
    ),
}
STAGES = {letter: Check(f"09.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
