"""Check of 07.f_and_g. Oracle: torch's autograd through the same computation in one process, where all ranks' parts are one sum.

Ranks are threads. The gradients that arrive from behind the operators are given, in tensors of their own, and looked at afterwards: nobody
may have written to them.

Tolerances. Digits are exact. The oracle adds float64 numbers in another order: 1e-12. bfloat16 has eight bits: sums of two are compared to
1/100.
"""

from copy import deepcopy

import torch

from shared.course.checking import Case, Check
from shared.parallel.comm.communicator import SingleRankCommunicator

from .ranks import CONTRACT, over_ranks, randn, sent

DIGITS = "arithmetic: rank i has 10^i times 1, 2, 3, ..., so each digit says how often that rank was counted"
ONE_PROCESS = "torch's autograd in one process"


def digits(ranks: int, *shape: int, dtype=torch.float64):
    """x of g on each rank, and what flows back to f on each: 10^rank times 1, 2, 3, ... What flows back to g is the same on all ranks."""

    def given():
        count = torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape).to(dtype)
        parts = [10**rank * count for rank in range(ranks)]
        return {"x_of_f": 3 * count, "gradient_to_f": parts, "x_of_g": deepcopy(parts), "gradient_to_g": 5 * count}

    return given


def strided(ranks: int):
    """Tensors whose elements do not lie one after the other: transposed ones, and one number shown three times, as behind a sum."""

    def given():
        made = digits(ranks, 3, 2)()
        shown = lambda number: torch.full((), number, dtype=torch.float64).expand(2, 3)  # noqa: E731
        parts = [part.T if rank % 2 else shown(10.0**rank) for rank, part in enumerate(made["x_of_g"])]
        return {"x_of_f": made["x_of_f"].T, "gradient_to_f": parts, "x_of_g": deepcopy(parts), "gradient_to_g": shown(7.0)}

    return given


def alone(operator, x, upstream):
    """An operator's value and the gradient of its argument."""
    leaf = x.detach().requires_grad_()
    value = operator(leaf)
    [gradient] = torch.autograd.grad(value, [leaf], upstream)
    return {"value": value.detach().clone(), "gradient": gradient.clone()}


def both(function, x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    """f of the same x with other gradients on each rank, then g of other x with the same gradient."""

    def work(world):
        f, g = function(world)
        return {"f": alone(f, x_of_f, gradient_to_f[world.rank]), "g": alone(g, x_of_g[world.rank], gradient_to_g)}

    return over_ranks(work, len(x_of_g))


def summed(x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    total = torch.stack(x_of_g).sum(0)
    told = {"f": {"value": x_of_f, "gradient": total}, "g": {"value": total, "gradient": gradient_to_g}}
    return {f"rank {rank}": told for rank in range(len(x_of_g))}


def twice(function, x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    """Both operators, used twice each before anything flows back, and then in another order."""

    def work(world):
        f, g = function(world)
        mine, arriving = x_of_g[world.rank], gradient_to_f[world.rank]
        w, x, y, z = (tensor.detach().requires_grad_() for tensor in (x_of_f, 2 * x_of_f, mine, 3 * mine))
        first, second, third, fourth = f(w), g(y), f(x), g(z)
        grads = [torch.autograd.grad(first, [w], arriving)[0], torch.autograd.grad(fourth, [z], gradient_to_g)[0]]
        grads += [torch.autograd.grad(third, [x], 2 * arriving)[0], torch.autograd.grad(second, [y], 2 * gradient_to_g)[0]]
        return {"values": [each.detach() for each in (first, second, third, fourth)], "gradients": grads}

    return over_ranks(work, len(x_of_g))


def of_twice(x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    total = torch.stack(x_of_g).sum(0)
    told = {"values": [x_of_f, total, 2 * x_of_f, 3 * total], "gradients": [total, gradient_to_g, 2 * total, 2 * gradient_to_g]}
    return {f"rank {rank}": told for rank in range(len(x_of_g))}


def overflown():
    """Numbers that are none: a run must see them, so that it skips the step."""
    made = digits(2, 4)()
    for numbers in (made["x_of_g"][1], made["gradient_to_f"][1]):
        numbers[:2] = torch.tensor([torch.inf, torch.nan])
    return made


def in_groups(function, groups, x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    def work(world):
        f, g = function(world.split("tp", groups))
        return {"f": alone(f, x_of_f, gradient_to_f[world.rank]), "g": alone(g, x_of_g[world.rank], gradient_to_g)}

    return over_ranks(work, len(x_of_g))


def of_groups(groups, x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    told = {}
    for group in groups:
        for rank in group:
            told[f"rank {rank}"] = summed(x_of_f, None, [x_of_g[member] for member in group], gradient_to_g)["rank 0"]
    return dict(sorted(told.items()))


def block(x, first, second, f=lambda x: x, g=lambda x: x):
    """A sublayer with its residual, as Megatron cuts it: x + g(tanh(f(x) A) B)."""
    return x + g((f(x) @ first).tanh() @ second)


def sublayers(function, x, first, second, ranks, flow):
    """Two sublayers in sequence, whose weights are cut over the ranks; the gradients of x and of this rank's weights."""

    def work(world):
        f, g = function(world)
        inner = torch.arange(first.shape[1]).tensor_split(ranks)[world.rank]
        leaves = [each.clone().requires_grad_() for each in (x, first[:, inner], second[inner])]
        value = block(block(*leaves, f, g), *leaves[1:], f, g)
        gradients = torch.autograd.grad(value, leaves, flow)
        return dict(zip(("value", "of x", "of A", "of B"), [value.detach(), *gradients], strict=True))

    return over_ranks(work, ranks)


def in_one(x, first, second, ranks, flow):
    leaves = [each.clone().requires_grad_() for each in (x, first, second)]
    value = block(block(*leaves), *leaves[1:])
    of_x, of_first, of_second = torch.autograd.grad(value, leaves, flow)
    told = {}
    for rank, inner in enumerate(torch.arange(first.shape[1]).tensor_split(ranks)):
        told[f"rank {rank}"] = {"value": value.detach(), "of x": of_x, "of A": of_first[:, inner], "of B": of_second[inner]}
    return told


def weights(ranks: int):
    made = {"x": randn(3, 5, seed=1), "first": randn(5, 11, seed=2), "second": randn(11, 5, seed=3), "flow": randn(3, 5, seed=4)}
    return lambda: {name: tensor.clone() for name, tensor in made.items()} | {"ranks": ranks}


def used(function, x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    """What each of the four passes sends, and how much is sent where no gradient is wanted."""

    def work(world):
        f, g = function(world)
        told, marks = {"making f and g": sent(world)}, len(world.trace.entries)
        passes = ("f", f, x_of_f, gradient_to_f[world.rank]), ("g", g, x_of_g[world.rank], gradient_to_g)
        for name, operator, x, upstream in passes:
            leaf = x.detach().requires_grad_()
            value = operator(leaf)
            told[f"forward of {name}"], marks = sent(world, marks), len(world.trace.entries)
            torch.autograd.grad(value, [leaf], upstream)
            told[f"backward of {name}"], marks = sent(world, marks), len(world.trace.entries)
        with torch.no_grad():
            f(x_of_f), g(x_of_f)
        return told | {"both without a gradient": sent(world, marks)}

    return over_ranks(work, len(x_of_g))


def one_each(x_of_f, gradient_to_f, x_of_g, gradient_to_g):
    one = [f"all_reduce of {x_of_f.numel() * x_of_f.itemsize} bytes"]
    told = {"making f and g": [], "forward of f": [], "backward of f": one, "forward of g": one, "backward of g": []}
    return {f"rank {rank}": told | {"both without a gradient": one} for rank in range(len(x_of_g))}


def apart(function, x):
    """Whether what is returned may be written to by what follows, without a change of x: for g; f may return x itself."""
    f, g = function(SingleRankCommunicator())
    with torch.no_grad():
        g(x).add_(1)
    return {"x": x.clone(), "f of x": f(x).clone()}


def case(rung, title, given, expected=summed, source=DIGITS, observe=both, tolerance=0.0):
    return Case(rung, title, given, expected, source, observe, rtol=tolerance, atol=tolerance)


CHECK = Check(
    exercise="07.f_and_g",
    outputs=("f", "g"),
    spoilt=("results of f", "results of g"),
    cases=[
        case("shape and dtype", "two ranks, [2, 3, 5] in float32", digits(2, 2, 3, 5, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "bfloat16", digits(2, 3, dtype=torch.bfloat16), source=CONTRACT),
        case("worked example", "three ranks, one number", digits(3, 1)),
        case("worked example", "two ranks, [2, 3]", digits(2, 2, 3)),
        case("property", "tensors that are not contiguous", strided(3), source="arithmetic"),
        case("property", "bfloat16", digits(2, 7, dtype=torch.bfloat16), source="arithmetic", tolerance=0.01),
        case("property", "each is called twice before anything flows back", digits(3, 2, 3), of_twice, DIGITS, twice),
        case(
            "property", "ranks 1, 3 and 4 are one group, 0 and 2 another", lambda: digits(5, 3)() | {"groups": [[1, 3, 4], [0, 2]]},
            of_groups, DIGITS, in_groups,
        ),
        case("property", "a rank has infinity and NaN", overflown, source="arithmetic"),
        case(
            "property", "a single rank: x is not changed by who writes to g(x)", lambda: {"x": torch.arange(1.0, 4.0)},
            lambda x: {"x": x, "f of x": x}, CONTRACT, apart,
        ),
        case("oracle", "two sublayers on one rank", weights(1), in_one, ONE_PROCESS, sublayers, 1e-12),
        case("two ranks", "two sublayers on two ranks", weights(2), in_one, ONE_PROCESS, sublayers, 1e-12),
        case("two ranks", "... and on three", weights(3), in_one, ONE_PROCESS, sublayers, 1e-12),
        case("budget", "what two ranks send, and when", digits(2, 7, 5), one_each, CONTRACT, used),
        case("budget", "... in bfloat16", digits(3, 7, 5, dtype=torch.bfloat16), one_each, CONTRACT, used),
    ],
)  # fmt: skip
