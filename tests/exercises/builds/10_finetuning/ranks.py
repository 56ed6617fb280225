"""Stage 9 of build 10: a linear layer with factors, cut over ranks, compared with one process. Ranks are threads."""

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shared.course.checking import Case
from shared.course.comparing import Said
from shared.parallel.comm.communicator import Communicator, SingleRankCommunicator
from shared.parallel.comm.threads import run_threads

from .pieces import NEAR, TEXT, WITHIN, Results, budget, randn

IN, OUT, R, SCALING = 12, 18, 2, 1.5
ONE_PROCESS = "one process with one dense weight W + s B A, in float64"
SMALL = 64  # bytes


def whole(bias: bool) -> dict[str, Tensor | None]:
    found = {"weight": randn(OUT, IN, seed=1), "bias": randn(OUT, seed=2) if bias else None}
    return found | {"lora_A": randn(R, IN, seed=3), "lora_B": randn(OUT, R, seed=4)}


def part(tensor: Tensor, along: int | None, rank: int, ranks: int) -> Tensor:
    return tensor if along is None else tensor.chunk(ranks, along)[rank]


def cuts(dimension: int) -> tuple[int | None, int | None, int | None, int | None]:
    """The dimension along which x, y, A and B are cut; None: each rank has all of it."""
    return (None, -1, None, 0) if dimension == 0 else (-1, None, 1, None)


def on_ranks(function: Any, ranks: int) -> list[Any]:
    return [function(SingleRankCommunicator())] if ranks == 1 else run_threads(function, ranks)


def calls_case(title: str, ranks: int, dimension: int, steps: list[list[tuple[int, ...]]], bias: bool = True, leaf: bool = True) -> Case:
    """steps: of each the shapes, less features, of the calls between two `cut_gradients`. leaf: whether x requires a gradient."""

    def expected(**_: Any) -> Results:
        held, found, (of_x, of_y, of_a, of_b) = whole(bias), {}, cuts(dimension)
        A, B = (held[name].requires_grad_() for name in ("lora_A", "lora_B"))
        for step, shapes in enumerate(steps):
            A.grad = B.grad = None
            for call, shape in enumerate(shapes):
                x = randn(*shape, IN, seed=10 * step + call).requires_grad_()
                y = torch.einsum("...i,oi->...o", x, held["weight"] + SCALING * torch.einsum("or,ri->oi", B, A))
                y = y if held["bias"] is None else y + held["bias"]
                y.backward(randn(*y.shape, seed=50 + call))
                for rank in range(ranks):
                    about = f"on rank {rank}, step {step}, call {call}"
                    found |= {f"y {about}": part(y.detach(), of_y, rank, ranks)}
                    found |= {f"gradient of x {about}": part(x.grad, of_x, rank, ranks)} if leaf else {}
            for rank in range(ranks):
                found[f"gradient of lora_A on rank {rank}, step {step}"] = part(A.grad, of_a, rank, ranks).clone()
                found[f"gradient of lora_B on rank {rank}, step {step}"] = part(B.grad, of_b, rank, ranks).clone()
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        of_x, of_y, *_ = cuts(dimension)

        def on_rank(group: Communicator) -> Results:
            own, found = adapters.cut(**whole(bias), scaling=SCALING, dimension=dimension, group=group), {}
            for step, shapes in enumerate(steps):
                outputs = []
                for call, shape in enumerate(shapes):
                    x = part(randn(*shape, IN, seed=10 * step + call), of_x, group.rank, ranks).clone().requires_grad_(leaf)
                    outputs.append((x, adapters.run_cut(own, x)))
                    found[f"y on rank {group.rank}, step {step}, call {call}"] = outputs[-1][1].detach().clone()
                for call, (x, y) in enumerate(outputs):
                    y.backward(part(randn(*shapes[call], OUT, seed=50 + call), of_y, group.rank, ranks))
                    if leaf:
                        gradient = Said("nothing") if x.grad is None else x.grad.clone()
                        found[f"gradient of x on rank {group.rank}, step {step}, call {call}"] = gradient
                for name, gradient in dict(adapters.cut_gradients(own)).items():
                    found[f"gradient of {name} on rank {group.rank}, step {step}"] = gradient.detach().clone()
            return found

        return {name: value for own in on_ranks(on_rank, ranks) for name, value in own.items()}

    shapes = [[list(shape) for shape in step] for step in steps]
    given: dict[str, Any] = {"ranks": ranks, "dimension": dimension, "x of each call, less features": shapes, "bias": bias}
    given |= {"in": IN, "out": OUT, "r": R, "s": SCALING, "x requires a gradient": leaf}
    return Case("two ranks", title, lambda: given, expected, ONE_PROCESS, observe, **NEAR)


def digits_case(title: str, ranks: int, dimension: int) -> Case:
    """Rank i adds 10^i to the gradient of the whole factor, so the gradient's digits say how often each rank counts."""
    about, name = "how often each rank counts in the gradient of {} on rank {}", "lora_B" if dimension else "lora_A"

    def observe(adapters: Any, **_: Any) -> Results:
        def on_rank(group: Communicator) -> Results:
            ones = torch.ones(1, 1).double()
            if dimension == 0:
                weight, A, B = torch.zeros(ranks, 1).double(), ones, ones.expand(ranks, 1).contiguous()
            else:
                weight, A, B = torch.zeros(1, ranks).double(), ones.expand(1, ranks).contiguous(), ones
            own = adapters.cut(weight, None, A, B, 1.0, dimension, group)
            x = torch.full((1, 1), 1.0 if dimension == 0 else 10.0**group.rank).double()
            y = adapters.run_cut(own, x)
            y.backward(torch.full((1, 1), 10.0**group.rank if dimension == 0 else 1.0).double())
            value = round(dict(adapters.cut_gradients(own))[name].item())
            said = [int(digit) for digit in reversed(f"{value:0{ranks}d}")] if 0 <= value < 10**ranks else Said(f"sum {value}")
            return {about.format(name, group.rank): said}

        return {key: value for own in on_ranks(on_rank, ranks) for key, value in own.items()}

    expected = lambda **_: {about.format(name, rank): [1] * ranks for rank in range(ranks)}  # noqa: E731
    given = {"ranks": ranks, "dimension": dimension}
    return Case("worked example", title, lambda: given, expected, "each rank's part counts once", observe)


def sent_case(title: str, dimension: int) -> Case:
    """Calls and bytes of a call, of its backward pass, and of `cut_gradients`; and whole tensors that are still in memory."""
    ranks, tokens = 2, 3
    x_bytes, y_bytes, factor = tokens * IN * 8, tokens * OUT * 8, R * (OUT if dimension else IN) * 8
    limits = [(0, 0), (1, x_bytes), (1, factor + SMALL)] if dimension == 0 else [(1, y_bytes), (0, 0), (1, factor + SMALL)]
    names = "forward", "backward", "cut_gradients"

    def observe(adapters: Any, **_: Any) -> Results:
        of_x, of_y, *_ = cuts(dimension)

        def on_rank(group: Communicator) -> Results:
            tensors = whole(True)
            cut = "weight", "lora_A" if dimension else "lora_B"
            storages = {name: StorageWeakRef(tensors[name].untyped_storage()) for name in cut}
            own = adapters.cut(**tensors, scaling=SCALING, dimension=dimension, group=group)
            del tensors
            if not all(storage.expired() for storage in storages.values()):
                gc.collect()
            kept = [name for name, storage in storages.items() if not storage.expired()]
            x = part(randn(tokens, IN), of_x, group.rank, ranks).clone().requires_grad_()
            sent, said = [], {f"whole tensors that are still in memory on rank {group.rank}": kept}

            def count(name: str) -> None:
                entries = group.trace.entries[sum(sent) :]
                sent.append(len(entries))
                calls, most = limits[names.index(name)]
                said[f"calls {name} on rank {group.rank}"] = budget(len(entries), calls, "calls")
                said[f"bytes {name} on rank {group.rank}"] = budget(sum(entry.bytes for entry in entries), most, "bytes")

            group.trace.clear()
            y = adapters.run_cut(own, x)
            count("forward")
            y.backward(part(randn(tokens, OUT), of_y, group.rank, ranks))
            count("backward")
            adapters.cut_gradients(own)
            count("cut_gradients")
            return said

        return {name: value for own in on_ranks(on_rank, ranks) for name, value in own.items()}

    expected = lambda **_: {  # noqa: E731
        f"{kind} {name} on rank {rank}": WITHIN for rank in range(ranks) for name in names for kind in ("calls", "bytes")
    } | {f"whole tensors that are still in memory on rank {rank}": [] for rank in range(ranks)}
    given = {"ranks": ranks, "dimension": dimension, "tokens": tokens, "in": IN, "out": OUT, "r": R}
    return Case("budget", title, lambda: given, expected, TEXT.format(9), observe)


RANKS = (
    calls_case("one rank, output features", 1, 0, [[(3,)]]),
    calls_case("one rank, input features", 1, 1, [[(3,)]]),
    digits_case("output features: each rank's part counts once", 3, 0),
    digits_case("input features: each rank's part counts once", 3, 1),
    calls_case("two ranks, output features", 2, 0, [[(3,)]]),
    calls_case("two ranks, input features", 2, 1, [[(3,)]]),
    calls_case("three ranks, output features, several calls in a step", 3, 0, [[(2, 3), (1, 4)], [(3,)]], bias=False),
    calls_case("three ranks, input features, several calls in a step", 3, 1, [[(2, 3), (1, 4)], [(3,)]], bias=False),
    calls_case("the first layer of a model, output features", 2, 0, [[(3,)]], leaf=False),
    calls_case("the first layer of a model, input features", 2, 1, [[(3,)]], leaf=False),
    sent_case("what is sent and kept, output features", 0),
    sent_case("what is sent and kept, input features", 1),
)
