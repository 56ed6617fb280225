"""The checks of chapter 07's repairs: a repaired program does on two and four ranks what the right program does in one process.

Sizes, seeds and numbers differ from those that the programs print, so that no repair can aim at what it sees. Tolerance: sums over ranks
are added in another order, which moves float64 by some 1e-15 of the largest summand; 1e-9 is far from that and from any mistake.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check
from shared.parallel.comm.threads import run_threads

NEAR = {"rtol": 1e-9, "atol": 1e-9}
ONE_PROCESS = "the right program in one process"


def right(letter: str) -> Any:
    return read_module(hunts()[f"07.hunt.{letter}"].solution_file)


def equal_case(title: str, letter: str, function: str, ranks: int, arguments: tuple, parts: Callable, **given: Any) -> Case:
    """The results of `function` on every rank are the right program's in one process, after parts(results of all ranks) joined them."""
    def expected(**_: Any) -> dict:
        return parts(run_threads(getattr(right(letter), function), 1, *arguments) * ranks, True)

    def observe(program: Any, **_: Any) -> dict:
        return parts(run_threads(getattr(program, function), ranks, *arguments), False)

    return Case("two ranks", title, lambda: {"ranks": ranks} | given, expected, ONE_PROCESS, observe, **NEAR)


# a: dropout. Random numbers may be drawn in more than one right way, so what they do is compared.

POSITIVE = torch.Generator().manual_seed(5)
UP, DOWN = (torch.rand(shape, generator=POSITIVE, dtype=torch.float64) / 4 for shape in ((24, 6), (6, 24)))
ROWS = 6000


def outputs(program: Any, ranks: int, *rates: float, up=UP, down=DOWN, seed: int = 8) -> list[torch.Tensor]:
    return run_threads(program.forward, ranks, torch.ones(ROWS, up.shape[1], dtype=torch.float64), up, down, *rates, seed)


def near(value: float, wanted: float, share: float) -> str:
    return "as in one process" if abs(value - wanted) <= share * abs(wanted) else f"{value:.3f}, in one process {wanted:.3f}"


def share_kept_by_both(program: Any, ranks: int, rank: int) -> float:
    """How many outputs are not dropped where each is one inner feature of `rank`, which has as many features as there are outputs.

    Both masks drop one half, so it is a quarter; it is one half where the two are drawn from the same seed.
    """
    eye = torch.eye(4, dtype=torch.float64)
    down = torch.cat([eye * (each == rank) for each in range(ranks)], dim=1)
    return (outputs(program, ranks, 0.5, 0.5, up=eye.repeat(ranks, 1), down=down)[0] != 0).double().mean().item()


def calls_of(program: Any, world: Any) -> int:
    program.forward(world, torch.ones(4, UP.shape[1], dtype=torch.float64), UP, DOWN, 0.4, 0.2, 8)
    return len(world.trace.entries)


def dropout_observations(program: Any, ranks: int) -> dict[str, Any]:
    """What a right repair says of itself: statistics over 6,000 rows, compared with the right program in one process."""
    plain, [reference] = outputs(program, ranks, 0.0, 0.0), outputs(right("a"), 1, 0.0, 0.0)
    noisy, [alone] = outputs(program, ranks, 0.4, 0.2), outputs(right("a"), 1, 0.4, 0.2)
    eye = torch.eye(8, dtype=torch.float64)
    kept = outputs(program, ranks, 0.5, 0.0, up=eye, down=eye)[0][:, :8] != 0
    together = (kept[:, :, None] == kept[:, None, :]).double().mean(dim=0)[~torch.eye(8, dtype=torch.bool)]
    dropped = outputs(program, ranks, 0.0, 0.5, up=eye, down=eye)
    both = [share_kept_by_both(program, ranks, rank) for rank in range(ranks)]
    calls = run_threads(lambda world: calls_of(program, world), ranks)
    # Statistics of 6,000 rows are known to about 1 %: 5 % for a mean or a spread, and 0.44 to 0.56 for a share of one half.
    return {
        "output without dropout": near((plain[0] - reference).abs().max().item() + 1, 1.0, 1e-9),
        "mean of the output": near(noisy[0].mean().item(), alone.mean().item(), 0.05),
        "spread of the output": near(noisy[0].std(dim=0).mean().item(), alone.std(dim=0).mean().item(), 0.05),
        "the same output on all ranks": all(torch.equal(noisy[0], other) for other in noisy),
        "the same output on all ranks, with dropout of the output alone": all(torch.equal(dropped[0], other) for other in dropped),
        "share of inner features that are dropped": near(1 - kept.double().mean().item(), 0.5, 0.05),
        "share of outputs that are dropped": near((dropped[0] == 0).double().mean().item(), 0.5, 0.05),
        "two inner features are dropped or kept together, at least": near(together.min().item(), 0.5, 0.12),
        "two inner features are dropped or kept together, at most": near(together.max().item(), 0.5, 0.12),
        "kept by an inner mask and the output's mask, at least": near(min(both), 0.25, 0.1),
        "kept by an inner mask and the output's mask, at most": near(max(both), 0.25, 0.1),
        "one all-reduce is enough": max(calls) <= 1,
        "the same seed gives the same output": torch.equal(noisy[0], outputs(program, ranks, 0.4, 0.2)[0]),
        "another seed gives another output": not torch.equal(*(outputs(program, ranks, 0.4, 0.0, seed=seed)[0] for seed in (8, 9))),
    }


def dropout_case(title: str, ranks: int) -> Case:
    observe = lambda program, **_: dropout_observations(program, ranks)  # noqa: E731
    expected = lambda **_: dropout_observations(right("a"), 1)  # noqa: E731
    return Case("property", title, lambda: {"ranks": ranks, "rows": ROWS}, expected, "statistics of one process", observe)


# b to e: the same numbers.


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The ranks' parts of up (cut by rows) or down (cut by columns) as the whole."""
    return torch.cat(parts, dim=1 if name == "down" else 0)


def trained(results: list[tuple[list[float], dict[str, torch.Tensor]]], alone: bool) -> dict[str, Any]:
    """Losses, and weights: parts joined, and what every rank holds whole by rank."""
    found: dict[str, Any] = {f"losses on rank {rank}": torch.tensor(losses).double() for rank, (losses, _) in enumerate(results)}
    for name in results[0][1]:
        parts = [weights[name] for _, weights in results]
        if name in ("norm", "down_bias"):
            found |= {f"{name} on rank {rank}": part for rank, part in enumerate(parts)}
        else:
            found[name] = parts[0] if alone else joined(name, parts)
    return found


def trained_whole(results: list[tuple], alone: bool) -> dict[str, Any]:
    names = ("losses", "gate_up", "down")
    by_rank = [(torch.tensor(losses).double(), *matrices) for losses, *matrices in results]
    return {f"{name} on rank {rank}": value for rank, values in enumerate(by_rank) for name, value in zip(names, values, strict=True)}


def loss_and_gradient(results: list[tuple], alone: bool) -> dict[str, Any]:
    losses, gradients = zip(*results, strict=True)
    found = {f"loss on rank {rank}": loss for rank, loss in enumerate(losses)}
    return found | {f"gradient on rank {rank}": gradient for rank, gradient in enumerate(gradients)}


def training(letter: str, title: str, ranks: int, steps: int, seed: int, parts: Callable = trained, **sizes: int) -> Case:
    example = right(letter).example(seed, **sizes)
    return equal_case(title, letter, "train", ranks, (*example, steps, 0.03), parts, steps=steps, rate=0.03, seed=seed, sizes=sizes)


def cross_entropy(title: str, ranks: int, scale: float) -> Case:
    x, head, targets = right("d").example(11, scale, vocabulary=37)
    return equal_case(title, "d", "loss_and_gradient", ranks, (x, head, targets), loss_and_gradient, vocabulary=37, logits_times=scale)


CASES = {
    "a": (dropout_case("two ranks", 2), dropout_case("four ranks", 4), dropout_case("one rank", 1)),
    "b": (
        training("b", "one step on two ranks", 2, 1, 21, inner=8),
        training("b", "five steps on two ranks", 2, 5, 22, inner=8),
        training("b", "five steps on four ranks", 4, 5, 23),
    ),
    "c": (
        training("c", "one step on two ranks", 2, 1, 21, trained_whole, inner=8),
        training("c", "five steps on two ranks", 2, 5, 22, trained_whole, inner=8),
        training("c", "five steps on four ranks", 4, 5, 23, trained_whole),
    ),
    "d": (
        cross_entropy("two ranks", 2, 1.0),
        cross_entropy("four ranks", 4, 2.0),
        cross_entropy("two ranks, logits beyond what exp can take", 2, 1000.0),
    ),
    "e": (
        training("e", "one step on two ranks", 2, 1, 21, positions=8, inner=8),
        training("e", "five steps on two ranks", 2, 5, 22, positions=8),
        training("e", "five steps on four ranks", 4, 5, 23),
    ),
}
STAGES = {letter: Check(f"07.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
