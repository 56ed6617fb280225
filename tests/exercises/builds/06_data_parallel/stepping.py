"""Build 06: stages 1 to 9, where results are compared with one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import (
    NEAR,
    ONE_PROCESS,
    TEXT,
    Alone,
    Batch,
    Digits,
    Model,
    Results,
    adamw,
    batches_of,
    described,
    digit_loss,
    make,
    momentum,
    on_groups,
    one_each,
    said,
    several,
    summed_loss,
)

# Stage 1: start.


def contents(model: Model) -> dict[str, Any]:
    held = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    held |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return held | {"modes": [module.training for module in model.modules()]}


def start_case(title: str, ranks: int, groups: int = 1, **options: Any) -> Case:
    given = {"ranks": ranks, "model": "another one on each rank", **options} | ({"groups in the world": groups} if groups > 1 else {})

    def model_of(rank: int, number: int) -> Model:
        model = Model(seed=rank + 10 * number, **options)
        model.blocks[0].eval()
        return model

    def named(number: int, rank: int, held: dict[str, Any]) -> Results:
        about = f" of group {number}" if groups > 1 else ""
        return {f"{name} on rank {rank}{about}": value for name, value in held.items()}

    def expected(**_: Any) -> Results:
        found: Results = {}
        for number in range(groups):
            for rank in range(ranks):
                found |= named(number, rank, contents(model_of(0, number)))
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, number: int) -> dict[str, Any]:
            model = model_of(group.rank, number)
            make(adapters, "replica", model, group)
            return contents(model)

        found: Results = {}
        for number, by_rank in enumerate(on_groups(on_rank, ranks, groups)):
            for rank, held in enumerate(by_rank):
                found |= named(number, rank, held)
        return found

    return Case("two ranks", title, lambda: given, expected, "rank 0's model, compared bit for bit", observe)


# Whole steps.


def step_case(
    title: str, kind: str, steps: Sequence[list[list[Batch]]], what: str = "gradients", optimizer: Callable = adamw,
    max_norm: float | None = None, bucket_bytes: int = 700, groups: int = 1, start: bool = False, forward_first: bool = False,
    **options: Any,
) -> Case:  # fmt: skip
    """Steps of a model on all ranks. what: "gradients" (with the losses) of the last step, "weights" after it, or "norms" of all steps.

    start: the ranks' models differ at first. forward_first: a forward pass without a backward pass comes before each step.
    """
    ranks = len(steps[0])
    given = {"kind": kind, "micro-batches": described(steps[-1]), "steps": len(steps), "bucket_bytes": bucket_bytes, **options}
    given |= {"max_norm": max_norm} if max_norm is not None else {}
    given |= {"groups in the world": groups} if groups > 1 else {}
    updated = what != "gradients"  # `update` comes with stage 5
    probe = steps[0][0][0][0] if steps[0][0] else None

    def named(rank: int, number: int, results: Results) -> Results:
        of = f" of group {number}" if groups > 1 else ""
        return {f"{name} on rank {rank}{of}": value for name, value in results.items()}

    def results_of(losses: list[Tensor], norms: list[Tensor], gradients: dict, weights: dict, logits: Tensor | None) -> Results:
        found: Results = {f"loss of step {number}": loss.detach() for number, loss in enumerate(losses)}
        if what == "norms":
            found |= {f"norm of step {number}": norm.detach() for number, norm in enumerate(norms)}
        if what == "gradients":
            found |= {f"gradient of {name}": said(gradient) for name, gradient in gradients.items()}
        if what == "weights":
            found |= weights | ({} if logits is None else {"logits after the last step": logits.detach()})
        return found

    sharded = kind in ("sharded", "recompute")

    def expected(**_: Any) -> Results:
        found: Results = {}
        for number in range(groups):
            alone, losses, norms = Alone(Model(**options), optimizer), [], []
            for batches in steps:
                losses.append(alone.backward(batches[number:] + batches[:number]))
                norms += [alone.update(max_norm)] if updated else []
            logits = alone.model(probe) if sharded and what == "weights" else None
            one = results_of(losses, norms, alone.gradients, {} if sharded else alone.weights(), logits)
            for rank in range(ranks):
                found |= named(rank, number, one)
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, number: int) -> Results:
            model = Model(seed=group.rank if start else 0, **options)
            parallel = make(adapters, kind, model, group, optimizer, bucket_bytes)
            losses, norms, gradients = [], [], {}
            for place, batches in enumerate(steps):
                own = (batches[number:] + batches[:number])[group.rank]
                if forward_first:
                    adapters.forward(parallel, own[0][0])
                losses.append(adapters.backward(parallel, own, summed_loss))
                if what == "gradients" and place == len(steps) - 1:
                    gradients = dict(adapters.gradients(parallel))
                if updated:
                    norms.append(adapters.update(parallel) if max_norm is None else adapters.update(parallel, max_norm))
            logits = adapters.forward(parallel, probe) if sharded and what == "weights" else None
            weights = {name: weight.detach().clone() for name, weight in model.named_parameters()} if not sharded else {}
            return named(group.rank, number, results_of(losses, norms, gradients, weights, logits))

        return {name: value for by_rank in on_groups(on_rank, ranks, groups) for found in by_rank for name, value in found.items()}

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def digits_case(title: str, kind: str, numbers: Sequence[int]) -> Case:
    """Micro-batch i, counted over all ranks, has one token and adds 10^i to each gradient."""
    ranks, total = len(numbers), sum(numbers)
    given = {"kind": kind, "micro-batches of each rank": list(numbers)}
    about = "how often each micro-batch is in the gradient of {}, on rank {}"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: int) -> Results:
            model, first = Digits(), sum(numbers[: group.rank])
            parallel = make(adapters, kind, model, group)
            own = [(torch.tensor([[0]]), torch.tensor([[10**i]])) for i in range(first, first + numbers[group.rank])]
            adapters.backward(parallel, own, digit_loss)
            found = dict(adapters.gradients(parallel))
            return {about.format(name, group.rank): in_digits(gradient, total) for name, gradient in found.items()}

        [results] = on_groups(on_rank, ranks)
        return {name: value for found in results for name, value in found.items()}

    def expected(**_: Any) -> Results:
        return {about.format(name, rank): [1] * total for rank in range(ranks) for name, _ in Digits().named_parameters()}

    return Case("worked example", title, lambda: given, expected, "each micro-batch counts once, and the sum is divided once", observe)


def in_digits(gradient: Tensor | None, total: int) -> Any:
    """The gradient times the tokens, one of each micro-batch, digit by digit from micro-batch 0 on."""
    value = 0.0 if gradient is None else gradient.sum().item() * total
    if abs(value - round(value)) > 1e-6 or not 0 <= value < 10**total:
        return f"{value:.6g}, times the tokens: not a sum of whole micro-batches"
    return [int(digit) for digit in reversed(f"{round(value):0{total}d}")]


FROZEN = {"frozen": ("embedding.weight", "far", "blocks.0.up.weight", "blocks.1.norm.bias")}
GRADIENTS = (
    digits_case("each rank counts once", "replica", [1, 1, 1]),
    step_case("every gradient of two ranks, evenly many tokens", "replica", [one_each(2, even=True)]),
    step_case("three ranks, unevenly many tokens, and a rank without any", "replica", [one_each(3)]),
    step_case("one bucket for each weight", "replica", [one_each(2)], bucket_bytes=1),
    step_case("one bucket for all weights", "replica", [one_each(2)], bucket_bytes=10**6),
    step_case("frozen weights, and a weight that is used twice", "replica", [one_each(2)], tied=True, frozen=("blocks.0.up.weight",)),
    step_case("a group of one rank", "replica", [one_each(1)]),
    step_case("two groups in the world", "replica", [one_each(2)], groups=2),
)
MANY = several(3, (3, 1, 2))
ACCUMULATE = (
    digits_case("each micro-batch counts once", "replica", [3, 3]),
    digits_case("unequally many micro-batches, and a rank without any", "replica", [3, 0, 1]),
    step_case("every gradient of unequally many micro-batches", "replica", [MANY]),
    step_case("a rank without micro-batches", "replica", [several(3, (2, 0, 3))]),
    step_case("rank 0 has no micro-batches", "replica", [several(2, (0, 2))]),
    step_case("a second step has gradients of its own", "replica", [several(2, (2, 2)), several(2, (2, 1), seed=1)]),
    step_case("a weight that only an earlier micro-batch uses", "replica", [[[*one_each(2)[0], *one_each(2, True)[0]]] * 2]),
)
ODD = [batches_of([(2, 5)], rank, 0.1, first=rank) for rank in range(2)]
THREE = [several(2, (2, 1), seed=number) for number in range(3)]
OF_THREE = [one_each(3, seed=number) for number in range(3)]
ZERO = (
    digits_case("each micro-batch counts once", "zero", [2, 1, 1]),
    step_case("every gradient", "zero", [one_each(3)]),
    step_case("weights after three steps of DDP with AdamW", "replica", THREE, "weights"),
    step_case("DDP, ranks whose blocks run in different orders", "replica", [ODD, ODD], "weights", bucket_bytes=1, backwards=True),
    step_case("weights after one step", "zero", [one_each(2)], "weights"),
    step_case("weights after three steps, AdamW", "zero", THREE, "weights"),
    step_case("three ranks, SGD with momentum", "zero", OF_THREE, "weights", momentum),
    step_case("one bucket for all", "zero", OF_THREE, "weights", bucket_bytes=10**6),
    step_case("frozen weights, and a weight that is used twice", "zero", THREE, "weights", tied=True, frozen=("blocks.0.up.weight",)),
    step_case("models that differ at first, two groups in the world", "zero", THREE[:1], "weights", start=True, groups=1),
    step_case("two groups in the world", "zero", THREE[:2], "weights", groups=2),
    step_case("a group of one rank", "zero", [several(1, (2,))] * 2, "weights"),
)
ALL_OF_0 = tuple(name for name, _ in Model().blocks[0].named_parameters("blocks.0"))
PAIRS = [several(2, (2, 2), seed=number) for number in range(3)]
REDUCE = (
    step_case("every gradient of two ranks", "sharded", [one_each(2)]),
    step_case("three ranks, three blocks", "sharded", [one_each(3)], blocks=3),
    step_case("two micro-batches on each rank", "sharded", [PAIRS[0]]),
    step_case("a second step has gradients of its own", "sharded", PAIRS[:2]),
    step_case("frozen weights: also the embedding, so that the first unit's input has none", "sharded", [one_each(2, True)], **FROZEN),
    step_case("a unit of which everything is frozen", "sharded", [one_each(2)], frozen=ALL_OF_0),
    step_case("a forward pass that no backward pass follows", "sharded", [one_each(2)], forward_first=True),
    step_case("a weight outside of units that is used twice", "sharded", [one_each(2)], tied=True),
    step_case("logits after three steps, AdamW", "sharded", PAIRS, "weights"),
    step_case("logits after three steps, SGD with momentum, three ranks", "sharded", OF_THREE, "weights", momentum),
    step_case("a weight that only the first of two steps uses", "sharded", [one_each(2), one_each(2, even=True)], "weights"),
    step_case("models that differ at first", "sharded", [one_each(2)], start=True),
    step_case("two groups in the world", "sharded", [one_each(2)], groups=2),
    step_case("a group of one rank", "sharded", [one_each(1)]),
)
CLIP = tuple(
    case
    for kind in ("replica", "zero", "sharded")
    for case in (
        step_case(f"the norm of all gradients: {kind}", kind, [one_each(3)], "norms"),
        step_case(f"clipped steps: {kind}", kind, PAIRS, "weights", momentum, max_norm=0.05),
        step_case(f"the norm before clipping: {kind}", kind, PAIRS[:1], "norms", momentum, max_norm=0.05),
        step_case(f"a norm below max_norm: {kind}", kind, PAIRS[:2], "weights", momentum, max_norm=100.0),
    )
)
ORDERS = (
    step_case("ranks whose blocks run in different orders", "replica", [ODD], bucket_bytes=1, backwards=True),
)
START = (
    start_case("two ranks", 2),
    start_case("three ranks, with frozen weights and a weight that is used twice", 3, tied=True, frozen=("blocks.0.up.weight",)),
    start_case("two groups in the world, each with a rank 0 of its own", 2, groups=2),
)
