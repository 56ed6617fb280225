"""Stages 8 and 9 of build 09: whole steps, their gradients and totals, and how the bias moves."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from shared.course.checking import Case
from shared.course.comparing import Said
from shared.parallel.comm.communicator import Communicator

from .pieces import (
    EXPERTS,
    NEAR,
    ONE_PROCESS,
    TRAINED,
    Results,
    Sizes,
    Whole,
    batches_by_rank,
    in_words,
    on_grid,
    part,
    plain,
    squared_error,
    weights_of,
)


def step_case(
    title: str, size: int, sizes: Sizes, experts: int, k: int, replicas: int = 1, bias: list[float] | None = None,
    none_on: int | None = None, balance: float = 0.0, z: float = 0.0, twice: bool = False, what: str = "gradients",
    renormalize: bool = True,
) -> Case:  # fmt: skip
    """none_on: a rank none of whose tokens count. twice: after a step with other tokens. what: gradients, totals (loss and norm), or bias
    (loads and the bias after it has moved, and then a call without a backward pass, another step, and both once more)."""
    weights, everything = weights_of(experts, bias=bias), batches_by_rank(sizes)
    for _, _, valid in everything[none_on] if none_on is not None else ():
        valid.fill_(False)
    given: dict[str, Any] = {"ranks of a group": size, "replicas": replicas, "tokens, B x S": in_words(sizes), "E": experts, "k": k}
    given |= {"tokens that count": [[int(valid.sum()) for _, _, valid in own] for own in everything], "balance": balance, "z": z}
    given |= {"router.bias": weights["router.bias"]} if bias else {}
    ranks = range(size * replicas)

    def expected(**_: Any) -> Results:
        whole, batches = Whole(weights, k, renormalize), sum(everything, [])
        if what == "bias":
            found: Results = {}
            for number in range(2):
                load = whole.load(batches)
                more = [sum(load.tolist()) - len(load) * own for own in load.tolist()]  # below the mean: more than 0
                whole.weights["router.bias"] += 0.125 * torch.tensor(more).sign()
                for rank in ranks:
                    found |= {f"load {number} on rank {rank}": load, f"bias {number} on rank {rank}": plain(whole.weights["router.bias"])}
            return found
        mean, sums = whole.step(batches, balance, z)
        if what == "totals":
            norm = torch.cat([gradient.flatten() for gradient in sums.values()]).norm()
            return {f"{name} on rank {rank}": value for rank in ranks for name, value in (("loss", mean), ("norm", norm))}
        return {f"gradient of {name} on rank {rank}": part(name, sums[name], rank % size, size) for rank in ranks for name in TRAINED}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> Results:
            layer = adapters.make_layer(weights_of(experts, bias=bias), k, renormalize, group, same)
            found, own = {}, everything[rank]
            if twice:
                adapters.step(layer, [(x.flip(1), targets, valid) for x, targets, valid in own], squared_error, balance, z)
            loss = adapters.step(layer, own, squared_error, balance, z)
            if what == "bias":
                for number in range(2):
                    load = adapters.update_bias(layer, 0.125)
                    found |= {f"load {number} on rank {rank}": plain(load)}
                    found |= {f"bias {number} on rank {rank}": plain(dict(adapters.state(layer))["router.bias"])}
                    with torch.no_grad():
                        adapters.forward(layer, own[0][0], own[0][2])
                    adapters.step(layer, own, squared_error, balance, z)
                return found
            if what == "totals":
                return {f"loss on rank {rank}": plain(loss), f"norm on rank {rank}": plain(adapters.gradient_norm(layer))}
            return {f"gradient of {name} on rank {rank}": plain(value) for name, value in dict(adapters.gradients(layer)).items()}

        return {name: value for own in on_grid(on_rank, size, replicas) for name, value in own.items()}

    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def digits_case(title: str, size: int, replicas: int) -> Case:
    """Rank i's token of each expert adds 10^i to the gradient of its down_proj, so the gradient's digits say how often each rank counts."""
    experts, ranks = size, size * replicas
    about = "how often the tokens of each rank are in the gradient of expert {} on rank {}"
    given = {"ranks of a group": size, "replicas": replicas, "tokens": "one for each expert on each rank"}

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator, same: Communicator, rank: int) -> Results:
            ones = torch.ones(experts, 1, experts).double()
            weights = {"router.weight": 9 * torch.eye(experts).double(), "router.bias": torch.zeros(experts).double()}
            weights |= {EXPERTS[0]: ones, EXPERTS[1]: ones / silu(ones), EXPERTS[2]: torch.ones(experts, experts, 1).double()}
            layer = adapters.make_layer(weights, 1, True, group, same)
            x, targets = torch.eye(experts).double().unsqueeze(0), torch.full((1, experts, 1), 10.0**rank).double()
            adapters.step(layer, [(x, targets, torch.ones(1, experts).bool())], lambda y, factor, valid: (y * factor).sum(), 0.0, 0.0)
            gradient = dict(adapters.gradients(layer))[EXPERTS[2]]
            own = range(group.rank, group.rank + 1)
            return {about.format(number, rank): digits(gradient[0, 0, 0], ranks) for number in own}

        return {name: value for own in on_grid(on_rank, size, replicas) for name, value in own.items()}

    def digits(gradient: Tensor, count: int) -> list[int] | Said:
        value = gradient.item() * experts * ranks
        if abs(value - round(value)) > 1e-6 or not 0 <= value < 10**count:
            return Said(f"{value:.6g}, times all tokens: not a sum of whole ranks")
        return [int(digit) for digit in reversed(f"{round(value):0{count}d}")]

    expected = lambda **_: {about.format(rank % size, rank): [1] * ranks for rank in range(ranks)}  # noqa: E731
    return Case("worked example", title, lambda: given, expected, "each rank's tokens count once, and the sum is divided once", observe)
