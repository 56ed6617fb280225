"""Check of 09.dispatch. Oracle: Python's `sorted`, which is stable, and numpy's `bincount`.

Sorts that are not asked to be stable put equal elements in reversed order here: on a CPU torch happens to sort stably, elsewhere it does
not.
Everything is whole numbers, compared exactly.
"""

import numpy
import torch

from shared.course.checking import Case, Check
from shared.course.counting import cost, within

from .common import CONTRACT
from .pieces import TiesReversed

SORTED = "Python's sorted and numpy's bincount"


def of(experts, num_experts):
    return lambda: {"experts": torch.tensor(experts, dtype=torch.int64), "num_experts": num_experts}


def drawn(tokens, k, num_experts, dropped=0.0, seed=1):
    """Each token chooses k different experts; some choices are dropped."""

    def given():
        generator = torch.Generator().manual_seed(seed)
        experts = torch.rand(tokens, num_experts, generator=generator).topk(k).indices
        experts[torch.rand(tokens, k, generator=generator) < dropped] = num_experts
        return {"experts": experts, "num_experts": num_experts}

    return given


def strided(how):
    """[9, 3] experts that do not lie one after the other in memory."""

    def given():
        made = drawn(9, 3, 5, 0.2)()
        experts = made["experts"]
        shown = experts.T.contiguous().T if how == "transposed" else torch.stack([experts, 4 - experts.clamp(max=4)], dim=-1)[..., 0]
        return made | {"experts": shown}

    return given


def by_sorted(experts, num_experts):
    flat = experts.reshape(-1).tolist()
    order = sorted(range(len(flat)), key=lambda choice: flat[choice])
    counts = numpy.bincount(numpy.array(flat, dtype=numpy.int64), minlength=num_experts + 1)[:num_experts]
    return {"order": torch.tensor(order, dtype=torch.int64), "counts": torch.from_numpy(counts).long()}


def elsewhere(function, experts, num_experts):
    with TiesReversed():
        order, counts = function(experts, num_experts)
    return {"order": order, "counts": counts}


def answer(order, counts):
    return lambda **_: {"order": torch.tensor(order, dtype=torch.int64), "counts": torch.tensor(counts, dtype=torch.int64)}


def given_sizes(function):
    sizes = {"256 tokens, 512 experts": drawn(256, 4, 512)(), "1280 tokens": drawn(1280, 4, 512)(), "2048 experts": drawn(256, 4, 2048)()}
    return cost(function, 12, (256 * 4 + 512) * 8, sizes)


def case(rung, title, given, expected=by_sorted, source=SORTED, observe=elsewhere):
    return Case(rung, title, given, expected, source, observe)


CHECK = Check(
    exercise="09.dispatch",
    outputs=("order", "counts"),
    spoilt=("order", "counts"),
    cases=[
        Case("shape and dtype", "five tokens with 3 of 7 experts", drawn(5, 3, 7), by_sorted, CONTRACT),
        case("worked example", "two tokens", of([[2, 0], [0, 1]], 4), answer([1, 2, 3, 0], [2, 1, 1, 0]), CONTRACT),
        case("worked example", "three tokens, one choice each", of([[2], [0], [1]], 3), answer([1, 2, 0], [1, 1, 1]), "arithmetic"),
        case("worked example", "two of six choices are dropped", of([[3, 1], [0, 3], [1, 0]], 3), answer([2, 5, 1, 4, 0, 3], [2, 2, 0]),
             "arithmetic: experts 0 0 1 1, and the dropped ones last"),
        case("property", "all tokens choose the same two experts", of([[4, 1]] * 6, 6)),
        case("property", "the first expert and the last ones have no tokens", of([[2, 1], [1, 2], [2, 3]], 7)),
        case("property", "every token chooses all experts", drawn(6, 5, 5)),
        case("property", "one expert", of([[0], [0], [0]], 1)),
        case("property", "one expert, and two dropped choices", of([[1], [0], [1], [0], [0]], 1)),
        case("property", "all choices are dropped", of([[3, 3], [3, 3]], 3)),
        case("property", "every choice of the last expert is dropped", of([[3, 0], [1, 3], [3, 1]], 3)),
        case("property", "no tokens", lambda: {"experts": torch.zeros(0, 2, dtype=torch.int64), "num_experts": 3}),
        case("property", "experts that are a transposed tensor", strided("transposed")),
        case("property", "experts that are every second number of a tensor", strided("every second")),
        case("property", "a hundred tokens: many choices of one expert", drawn(100, 2, 3, 0.1)),
        case("oracle", "211 tokens with 4 of 13 experts, a tenth dropped", drawn(211, 4, 13, 0.1)),
        case("oracle", "8 of 256 experts", drawn(37, 8, 256, seed=5)),
        case("oracle", "600 tokens with 8 of 4096 experts", drawn(600, 8, 4096, 0.05, seed=7)),
        Case("budget", "more tokens or experts, and memory, in tensors of one number for each choice and expert", dict,
             lambda: within(12), CONTRACT, given_sizes),
    ],
)  # fmt: skip
