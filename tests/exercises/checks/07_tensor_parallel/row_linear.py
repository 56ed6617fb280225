"""Check of 07.row_linear. Oracle: torch.nn.functional.linear of all input features, in one process.

`combine` is given what the other ranks have, or, in the cases over ranks, adds up over threads. It notes what it is called with.

Tolerances. Digits are exact. The oracle adds float64 numbers in another order: 1e-12. The dtype of a product in 16 bits is compared, and
its numbers to 1/100.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.course.checking import Case, Check
from shared.parallel.comm.communicator import Communicator

from .ranks import CONTRACT, over_ranks, randn

ORACLE = "torch.nn.functional.linear of all input features"


class Others:
    """Adds what the other ranks have to this rank's part; with `keep`, returns these positions of the sum only. It counts its calls."""

    def __init__(self, others: Tensor, keep: slice | None = None):
        self.others, self.keep, self.calls = others, keep, []
        self.__doc__ = "adds what the other ranks have"

    def __call__(self, part: Tensor) -> Tensor:
        self.calls.append(part.detach().clone())
        whole = part + self.others.to(part.dtype)
        return whole if self.keep is None else whole[:, self.keep].contiguous()


class OverRanks(torch.autograd.Function):
    """The sum over the ranks, with which all of them continue."""

    @staticmethod
    def forward(ctx, part: Tensor, group: Communicator) -> Tensor:
        total = part.clone()
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor):
        return upstream, None


def numbers(x, weight, bias, others, keep=None, dtype=torch.float64):
    made = [None if each is None else torch.tensor(each, dtype=dtype) for each in (x, weight, bias, others)]
    return lambda: dict(zip(("x", "weight", "bias"), made, strict=False)) | {"combine": Others(made[3], keep)}


def drawn(*shape: int, out: int = 7, bias: bool = True, keep=None, dtype=torch.float64):
    def given():
        x, weight = randn(*shape, seed=1, dtype=dtype), randn(out, shape[-1], seed=2, dtype=dtype)
        others = randn(*shape[:-1], out, seed=4, dtype=dtype)
        return {"x": x, "weight": weight, "bias": randn(out, seed=3, dtype=dtype) if bias else None, "combine": Others(others, keep)}

    return given


def with_gradients(function, x, weight, bias, combine):
    """The result, and what flows back through it for a random gradient."""
    leaves = {name: t.detach().requires_grad_() for name, t in (("x", x), ("weight", weight), ("bias", bias)) if t is not None}
    y = function(leaves["x"], leaves["weight"], leaves.get("bias"), combine)
    gradients = torch.autograd.grad(y, list(leaves.values()), randn(*y.shape, seed=9, dtype=y.dtype), allow_unused=True)
    told = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"y": y.detach()} | told


def whole(x, weight, bias, combine):
    """What one process computes: the others' part and this one's, and the bias once."""

    def layer(x, weight, bias, combine):
        y = F.linear(x, weight, bias) + combine.others
        return y if combine.keep is None else y[:, combine.keep]

    return with_gradients(layer, x, weight, bias, combine)


def under_autocast(function, x, weight, bias, combine):
    """A layer in mixed precision: float32 weights, products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return with_gradients(function, x, weight, bias, combine)


def with_others(x, weight, bias, combine):
    return F.linear(x, weight, bias) + combine.others.bfloat16()


def over_threads(function, x, weight, bias, ranks):
    """The layer cut over ranks; gradients of this rank's features and weights, and of the bias, which every rank has."""

    def work(world):
        mine = torch.arange(x.shape[-1]).tensor_split(ranks)[world.rank]
        return with_gradients(function, x[..., mine], weight[:, mine], bias, lambda part: OverRanks.apply(part, world))

    return over_ranks(work, ranks)


def in_one(x, weight, bias, ranks):
    told = with_gradients(lambda x, weight, bias, combine: F.linear(x, weight, bias), x, weight, bias, None)
    parts = torch.arange(x.shape[-1]).tensor_split(ranks)
    cut = ("gradient of x", "gradient of weight")
    return {f"rank {rank}": told | {name: told[name][..., mine] for name in cut} for rank, mine in enumerate(parts)}


def cut_over(ranks: int):
    made = {"x": randn(2, 3, 11, seed=1), "weight": randn(5, 11, seed=2), "bias": randn(5, seed=3)}
    return lambda: {name: tensor.clone() for name, tensor in made.items()} | {"ranks": ranks}


def calls(function, x, weight, bias, combine):
    function(x, weight, bias, combine)
    return {"calls of combine": len(combine.calls), "with": [each.clone() for each in combine.calls]}


def one_call(x, weight, bias, combine):
    return {"calls of combine": 1, "with": [F.linear(x, weight)]}


def give(*rows):
    return lambda **_: {"y": torch.tensor(rows, dtype=torch.float64)}


def case(rung, title, given, expected=whole, source=ORACLE, observe=with_gradients, tolerance=1e-12):
    return Case(rung, title, given, expected, source, observe, rtol=tolerance, atol=tolerance)


CHECK = Check(
    exercise="07.row_linear",
    outputs=("y",),
    spoilt=("y", "gradients through y"),
    cases=[
        case("shape and dtype", "x [2, 3, 5], weight [7, 5], float32", drawn(2, 3, 5, dtype=torch.float32), source=CONTRACT),
        case(
            "worked example", "1 and 2 into 3 outputs; other ranks have 10, 20, 30; the bias is 100, 200, 300",
            numbers([[1.0, 2.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [100.0, 200.0, 300.0], [[10.0, 20.0, 30.0]]),
            give([111.0, 222.0, 333.0]), "arithmetic: 1 + 10 + 100, 2 + 20 + 200, 3 + 30 + 300", None,
        ),
        case(
            "worked example", "the same without a bias",
            numbers([[1.0, 2.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], None, [[10.0, 20.0, 30.0]]), give([11.0, 22.0, 33.0]),
            "arithmetic", None,
        ),
        case("property", "no bias, [2, 3, 5]", drawn(2, 3, 5, bias=False)),
        case("property", "`combine` returns some positions only", drawn(2, 6, 5, keep=slice(2, 4))),
        case("property", "as many outputs as positions", drawn(7, 7, 7)),
        case("property", "one row, one feature", drawn(1, 1)),
        case(
            "property", "under autocast to bfloat16", drawn(2, 3, 5, dtype=torch.float32, out=3), tolerance=0.1,
            expected=lambda **given: under_autocast(with_others, **given), observe=under_autocast,
        ),
        case("oracle", "x [3, 13], weight [7, 13]", drawn(3, 13)),
        case("two ranks", "11 features over two ranks", cut_over(2), in_one, ORACLE, over_threads),
        case("two ranks", "... and over three", cut_over(3), in_one, ORACLE, over_threads),
        case("budget", "what `combine` is called with", drawn(2, 3, 5), one_call, CONTRACT, calls),
    ],
)  # fmt: skip
