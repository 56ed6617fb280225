"""Stages 4 to 7 and 10 of build 09: calls of the layer and their backward passes, the exchange of rows, and what each rank holds."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from shared.course.checking import Case
from shared.parallel.comm.communicator import Communicator

from .pieces import (
    EXPERTS,
    NEAR,
    ONE_PROCESS,
    TRAINED,
    Results,
    Sizes,
    Whole,
    alone,
    batches_by_rank,
    batches_of,
    gradients_by,
    in_words,
    on_grid,
    part,
    plain,
    randn,
    weights_of,
)

# Stages 4, 5, 7 and 10: calls of the layer, and their backward passes.


def calls_case(
    title: str, size: int, sizes: Sizes, experts: int, k: int, renormalize: bool, replicas: int = 1, bias: list[float] | None = None,
    losses: bool = False, leaf: bool = True, load: bool = False, again: bool = False, rung: str = "two ranks",
) -> Case:  # fmt: skip
    """Each rank calls the layer for each of its micro-batches; then their backward passes run, in the same order.

    losses: also the two losses. leaf: whether the tokens require a gradient, which those of a model's first layer do not. load: also
    the loads, after calls that have no backward pass. again: under activation checkpointing, so each call is made once more before its
    backward pass.
    """
    weights, everything = weights_of(experts, bias=bias), batches_by_rank(sizes)
    given: dict[str, Any] = {"tokens, B x S": in_words(sizes), "E": experts, "k": k, "renormalize": renormalize}
    given |= {"ranks of a group": size, "replicas": replicas} if size * replicas > 1 else {}
    given |= {"router.bias": weights["router.bias"]} if bias else {}
    given |= {"activation checkpointing": True} if again else {}

    def results(rank: int, call: Callable, inputs: dict[str, Tensor]) -> Results:
        """By the same way for the oracle and for a build."""
        about = f" on rank {rank}" if size * replicas > 1 else ""
        found, outputs, tokens, sums = {}, [], {}, {}
        for number, (x, _, valid) in enumerate(everything[rank]):
            tokens[f"x {number}"] = x.clone().requires_grad_(leaf)
            made = call(tokens[f"x {number}"], valid.clone())
            found[f"y {number}{about}"] = plain(made[0])
            if losses:
                found |= {f"{name} {number}{about}": plain(loss) for name, loss in zip(("balance", "z"), made[1:], strict=True)}
            outputs.append(list(made[: 3 if losses else 1]))
        for number, own in enumerate(outputs):
            cotangents = [randn(*each.shape, seed=7 + number) for each in own]
            for name, gradient in gradients_by(own, cotangents, {f"x {number}": tokens[f"x {number}"]} | inputs).items():
                sums[name] = sums[name] + gradient if name in sums and isinstance(gradient, Tensor) else gradient
        return found | {f"{name}{about}": value for name, value in sums.items()}

    def expected(**_: Any) -> Results:
        found: Results = {}
        for rank in range(size * replicas):
            whole = Whole(weights, k, renormalize)
            found |= results(rank, whole.forward, {name: whole.weights[name] for name in TRAINED})
        return summed(found, weights, size, replicas) | ({"load": whole.load(sum(everything, []))} if load else {})

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> tuple[Results, Tensor | None]:
            layer = adapters.make_layer(weights_of(experts, bias=bias), k, renormalize, group, same)
            call = partial(adapters.forward, layer)
            if again:
                call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
            for is_evaluation in (True, False) if load else ():  # calls without a backward pass, which are not in the load
                with torch.set_grad_enabled(not is_evaluation):
                    adapters.forward(layer, everything[rank][0][0], everything[rank][0][2])
            held = dict(adapters.state(layer))
            found = results(rank, call, {name: held[name] for name in TRAINED})
            return found, adapters.update_bias(layer, 0.5) if load else None

        by_rank = [on_rank(*alone(), 0)] if size * replicas == 1 else on_grid(on_rank, size, replicas)
        found = {name: value for own, _ in by_rank for name, value in own.items()}
        return found | ({"load": plain(by_rank[-1][1])} if load else {})

    return Case(rung, title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def summed(found: Results, weights: dict[str, Tensor], size: int, replicas: int) -> Results:
    """From whole gradients by each rank's tokens to what a rank has after its backward pass: for its experts the sum over the ranks of its
    group, for the router the gradient of its own tokens."""
    if size * replicas == 1:
        return found
    result = {name: value for name, value in found.items() if not any(f"of {expert} " in name for expert in EXPERTS)}
    for rank in range(size * replicas):
        group = range(rank // size * size, rank // size * size + size)
        for name in EXPERTS:
            whole = sum(found[f"gradient of {name} on rank {other}"] for other in group)
            result[f"gradient of {name} on rank {rank}"] = part(name, whole, rank % size, size)
    return result


def half_case() -> Case:
    """A layer in bfloat16 gives bfloat16."""
    [(x, _, valid)] = batches_of([(2, 9)])
    weights = {name: weight.bfloat16() for name, weight in weights_of(4).items()}

    def expected(**_: Any) -> Results:
        y, *_ = Whole({name: weight.double() for name, weight in weights.items()}, 2, True).forward(x.bfloat16().double(), valid)
        return {"y": y.detach().bfloat16()}

    def observe(adapters: Any, **_: Any) -> Results:
        layer = adapters.make_layer({name: weight.clone() for name, weight in weights.items()}, 2, True, *alone())
        with torch.no_grad():
            return {"y": adapters.forward(layer, x.bfloat16(), valid)[0]}

    given = {"dtype of x and of all weights": "bfloat16"}
    return Case("oracle", "bfloat16 in, bfloat16 out", lambda: given, expected, ONE_PROCESS, observe, rtol=5e-2, atol=5e-2)


# Stage 6: exchange.


def exchange_case(title: str, numbers: list[list[int]], replicas: int = 1, dtype: torch.dtype = torch.float64, **how: bool) -> Case:
    """numbers[from][to]: rows that travel. Row i of rank r holds 100 r + i. how: strided (rows and gradients are not contiguous), twice (a
    second call, the other way round, before the first one's backward pass)."""
    ranks = len(numbers)
    given = {"rows from each rank to each": numbers, "replicas": replicas} | {name: True for name in how}
    returned = [list(column) for column in zip(*numbers, strict=True)]

    def rows_of(rank: int, count: int) -> Tensor:
        rows = (100.0 * rank + torch.arange(count).unsqueeze(-1) + torch.tensor([0.0, 0.25])).to(dtype)
        return rows.T.contiguous().T if how.get("strided") else rows

    def cotangent(rank: int, count: int, seed: int) -> Tensor:
        return (randn(2, count, seed=seed + rank).T if how.get("strided") else randn(count, 2, seed=seed + rank)).to(dtype)

    def by_hand(kept: list[list[Tensor]], rank: int) -> Tensor:
        return torch.cat([kept[source][rank] for source in range(ranks)])

    def one(tables: list[list[int]], rows: list[Tensor], towards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        back = [list(column) for column in zip(*tables, strict=True)]
        there = [by_hand([list(each.split(own)) for each, own in zip(rows, tables, strict=True)], rank) for rank in range(ranks)]
        home = [by_hand([list(each.split(own)) for each, own in zip(towards, back, strict=True)], rank) for rank in range(ranks)]
        return there, home

    def expected(**_: Any) -> Results:
        found: Results = {}
        for first in range(0, ranks * replicas, ranks):
            for call, (there, back) in enumerate([(numbers, returned), (returned, numbers)][: 2 if how.get("twice") else 1]):
                rows = [rows_of(first + rank, sum(there[rank])) for rank in range(ranks)]
                towards = [cotangent(first + rank, sum(back[rank]), call) for rank in range(ranks)]
                for rank, pair in enumerate(zip(*one(there, rows, towards), strict=True)):
                    about = f"on rank {first + rank}, call {call}"
                    found |= {f"arrived {about}": pair[0], f"gradient {about}": pair[1]}
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, _: Communicator, number: int) -> Results:
            found, made = {}, []
            for call, (there, back) in enumerate([(numbers, returned), (returned, numbers)][: 2 if how.get("twice") else 1]):
                rows = rows_of(number, sum(there[group.rank])).requires_grad_()
                made.append((rows, adapters.exchange(rows, list(there[group.rank]), list(back[group.rank]), group)))
                found[f"arrived on rank {number}, call {call}"] = plain(made[-1][1])
            for call, (rows, arrived) in enumerate(made):
                towards = cotangent(number, len(arrived), call)
                found[f"gradient on rank {number}, call {call}"] = gradients_by([arrived], [towards], {"rows": rows})["gradient of rows"]
            return found

        return {name: value for own in on_grid(on_rank, ranks, replicas) for name, value in own.items()}

    return Case("two ranks", title, lambda: given, expected, "lists of rows, taken by hand", observe)


# Stage 7: what each rank holds.


def held_case(title: str, size: int, experts: int) -> Case:
    given = {"ranks": size, "E": experts}
    whole, about = weights_of(experts), "whole weights that are still in memory"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> Results:
            weights = weights_of(experts)
            storages = {name: StorageWeakRef(weight.untyped_storage()) for name, weight in weights.items() if name in EXPERTS}
            layer = adapters.make_layer(weights, 2, True, group, same)
            del weights
            held = dict(adapters.state(layer))
            found = {f"{name} on rank {rank}": plain(value) for name, value in held.items()}
            if not all(storage.expired() for storage in storages.values()):
                gc.collect()  # what is only part of a circle of references goes
            kept = [name for name, storage in storages.items() if not storage.expired()]
            views = [name for name in kept if held[name].untyped_storage().nbytes() > held[name].nbytes]
            said = [f"{name}, of which what is held is a view" if name in views else name for name in kept]
            return found | {f"{about} on rank {rank}": said}

        return {name: value for own in on_grid(on_rank, size) for name, value in own.items()}

    def expected(**_: Any) -> Results:
        ranks = range(size)
        parts = {f"{name} on rank {rank}": part(name, weight, rank, size) for name, weight in whole.items() for rank in ranks}
        return parts | {f"{about} on rank {rank}": [] for rank in ranks}

    return Case("property", title, lambda: given, expected, "the layer's weights, compared bit for bit", observe, rtol=0.0)
