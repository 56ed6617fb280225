"""Check of 10.lora_linear. Oracle: the layer with the merged weight, one product, with gradients by torch's autograd; gradcheck;
torch's own dropout.

Tolerances. float64: 1e-12 of sums of a few dozen products of numbers around 1. bfloat16 keeps 8 bits, and the order of roundings is free:
0.03. What dropout leaves is compared exactly.
"""

import contextlib

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check
from shared.course.counting import Used

from .common import CONTRACT, cases_of, gradients, randn

MERGED = "one product with W + scaling * B A"
DROPPED = "torch.nn.functional.dropout: one call on x"
LEAVES = ("x", "bias", "lora_A", "lora_B")


def drawn(*leading, size=7, out=5, r=2, bias=True, scaling=0.75, dropout=0.0, dtype=torch.float64, seed=1):
    def given():
        return {
            "x": randn(*leading, size, seed=seed, dtype=dtype), "weight": randn(out, size, seed=seed + 1, dtype=dtype),
            "bias": randn(out, seed=seed + 2, dtype=dtype) if bias else None, "lora_A": randn(r, size, seed=seed + 3, dtype=dtype),
            "lora_B": randn(out, r, seed=seed + 4, dtype=dtype), "scaling": scaling, "dropout": dropout,
        }  # fmt: skip

    return given


def of(x, weight, lora_A, lora_B, scaling, bias=None, dropout=0.0, dtype=torch.float64):
    tensors = {"x": x, "weight": weight, "bias": bias, "lora_A": lora_A, "lora_B": lora_B}
    return lambda: {name: None if given is None else torch.tensor(given, dtype=dtype) for name, given in tensors.items()} | {
        "scaling": scaling, "dropout": dropout}  # fmt: skip


def applied(function, **given):
    """The output, and what flows back to everything that is trained."""
    leaves = {name: given[name].detach().requires_grad_() for name in LEAVES if given[name] is not None}
    output = function(**given | leaves)
    return {"y": output} | gradients(output, **leaves)


def merged(x, weight, bias, lora_A, lora_B, scaling, dropout):
    """By one product with the merged weight; where x is dropped, by a product with the columns that are left."""
    leaves = {"x": x, "bias": bias, "lora_A": lora_A, "lora_B": lora_B}
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    kept = F.dropout(torch.ones_like(x), dropout)
    output = torch.einsum("...i,oi->...o", leaves["x"], weight)
    update = scaling * torch.einsum("or,ri->oi", leaves["lora_B"], leaves["lora_A"])
    output = output + torch.einsum("...i,oi->...o", leaves["x"] * kept, update) + leaves.get("bias", torch.zeros((), dtype=x.dtype))
    return {"y": output} | gradients(output, **leaves)


def value(function, **given):
    return {"y": function(**given)}


def only_value(**given):
    return {"y": merged(**given)["y"]}


def answer(y):
    return lambda x, **_: {"y": torch.tensor(y, dtype=x.dtype)}


def seen_through(function, x, dropout, **_):
    """x as the addition sees it and as the layer sees it: A, B and W let every feature through, the layer's a thousand times as large."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    with_layer = function(x, 1024 * eye, None, eye, eye, 1.0, dropout)
    after = torch.rand(3)
    torch.manual_seed(0)
    alone = function(x, 0 * eye, None, eye, eye, 1.0, dropout)
    again = function(x, 0 * eye, None, eye, eye, 1.0, dropout)
    return {
        "the addition's input": alone, "the layer's input": (with_layer - alone) / 1024, "the next random numbers": after,
        "is drawn anew at each call": not torch.equal(alone, again),
    }  # fmt: skip


def without_gradients(function, **given):
    with torch.no_grad():
        return seen_through(function, **given)


def dropped(x, dropout, **_):
    alone = F.dropout(x, dropout)
    after = torch.rand(3)
    return {"the addition's input": alone, "the layer's input": x, "is drawn anew at each call": True, "the next random numbers": after}


def strided():
    made = drawn(3, 4)()
    turned = {name: made[name].transpose(0, -1).contiguous().transpose(0, -1) for name in ("x", "weight", "lora_A", "lora_B")}
    return made | turned


def twice(function, **given):
    """The same tensors in two calls, as with a layer that is used in two places: sums, and nothing that the first call left behind."""
    return applied(lambda **arguments: function(**arguments) + 2 * function(**arguments), **given)


def twice_merged(**given):
    found = merged(**given)
    return {name: 3 * tensor for name, tensor in found.items()}


def under_autocast(function, **given):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(**given)
    return {"y": found}


def in_bfloat16(**given):
    return {"y": only_value(**given)["y"].to(torch.bfloat16)}


def checked(function, x, weight, bias, lora_A, lora_B, scaling, dropout):
    inputs = [tensor.detach().requires_grad_() for tensor in (x, bias, lora_A, lora_B)]
    agrees = torch.autograd.gradcheck(lambda x, b, a, bb: function(x, weight, b, a, bb, scaling, dropout), inputs, raise_exception=False)
    return {"the gradients are those of small differences": agrees}


def memory(function, training, **given):
    """Whether a tensor as large as the weight is made. There are few tokens and two ranks, so nothing else is large."""
    leaves = {name: given[name].requires_grad_() for name in LEAVES} if training else {}
    with Used() as used, contextlib.nullcontext() if training else torch.no_grad():
        found = function(**given | leaves)
        if training:
            found.backward(torch.ones_like(found))
    weight = given["weight"]
    return {"a matrix [out, in] is made": used.largest[0] >= weight.nbytes, "largest tensors that are made at a time": (
        "few" if used.peak < weight.nbytes else f"together more than the weight, the largest {used.largest[1]}")}  # fmt: skip


def large(training):
    """Many numbers in the weight, few in anything else."""
    return lambda: drawn(3, size=257, out=263, r=2, dropout=0.1)() | {"training": training}


def small(**_):
    return {"a matrix [out, in] is made": False, "largest tensors that are made at a time": "few"}


case = cases_of(merged, MERGED, applied)


def example(title, given, y, source="arithmetic"):
    return Case("worked example", title, given, answer(y), source, rtol=1e-12)


EYE = [[1.0, 0.0], [0.0, 1.0]]

CHECK = Check(
    exercise="10.lora_linear",
    outputs=("y",),
    spoilt=("y", "gradients through y"),
    cases=[
        case("shape and dtype", "float32 [2, 3, 7] to [2, 3, 5]", drawn(2, 3, dtype=torch.float32), source=CONTRACT),
        case("shape and dtype", "bfloat16, without a bias", drawn(3, bias=False, dtype=torch.bfloat16), source=CONTRACT),
        example("the contract's", of([[1.0, 2.0]], EYE, [[1.0, 1.0]], [[0.0], [10.0]], 0.5), [[1.0, 17.0]], CONTRACT),
        example("B is 0, as before the first step: the layer alone", of([[1.0, 2.0]], EYE, [[3.0, 4.0]], [[0.0], [0.0]], 2.0),
                [[1.0, 2.0]]),
        example("a bias: 1 + 0.5 * 30, 2 + 0.5 * 60", of([[3.0, 0.0]], [[0.0, 0.0]] * 2, [[1.0, 0.0]], [[10.0], [20.0]], 0.5, [1.0, 2.0]),
                [[16.0, 32.0]]),
        example("rank 2, three features to one: 2 * (1 * 3 + 10 * 4)", of(
            [1.0, 1.0, 1.0], [[0.0] * 3], [[1.0, 1.0, 1.0], [0.0, 2.0, 2.0]], [[1.0, 10.0]], 2.0), [86.0]),
        case("property", "a token without other dimensions", drawn()),
        case("property", "tokens [2, 3, 4]", drawn(2, 3, 4)),
        case("property", "without a bias", drawn(3, bias=False)),
        case("property", "no tokens", drawn(0)),
        case("property", "rank 1", drawn(3, r=1)),
        case("property", "a rank above both widths", drawn(3, size=3, out=2, r=5)),
        case("property", "as many features in as out as ranks", drawn(4, size=4, out=4, r=4)),
        case("property", "scaling 0.125", drawn(3, scaling=0.125)),
        case("property", "scaling -2, and a rank of 3", drawn(3, r=3, scaling=-2.0)),
        case("property", "scaling 0", drawn(3, scaling=0.0)),
        case("property", "scaling 2 / sqrt(3), of a rank-stabilized LoRA", drawn(3, r=3, scaling=2 / 3**0.5)),
        case("property", "B is 0, and learns", lambda: drawn(3)() | {"lora_B": torch.zeros(5, 2).double()}),
        case("property", "a bias of zeros, which learns", lambda: drawn(3)() | {"bias": torch.zeros(5).double()}),
        case("property", "tensors that are not contiguous", strided),
        case("property", "a bias that is large beside everything else", lambda: drawn(3)() | {"bias": 1e6 * randn(5, seed=9)},
             tolerance=1e-9),
        case("property", "two calls with the same tensors", drawn(3), twice_merged, MERGED, twice),
        case("property", "what dropout leaves: 0.25 of 60 numbers", lambda: {
            "x": 1 + torch.arange(60.0).view(12, 5), "dropout": 0.25}, dropped, DROPPED, seen_through, 0.0),
        case("property", "... 0.9 of [2, 30, 2]", lambda: {
            "x": 1 + torch.arange(120.0).view(2, 30, 2), "dropout": 0.9}, dropped, DROPPED, seen_through, 1e-4),
        case("property", "... without gradients, as in the first pass of activation checkpointing", lambda: {
            "x": 1 + torch.arange(60.0).view(12, 5), "dropout": 0.5}, dropped, DROPPED, without_gradients, 0.0),
        case("property", "gradients where inputs were dropped", drawn(11, dropout=0.5)),
        case("property", "float32 under autocast to bfloat16", drawn(9, dtype=torch.float32), in_bfloat16, MERGED, under_autocast, 0.03),
        case("property", "bfloat16", drawn(9, dtype=torch.bfloat16), only_value, MERGED, value, 0.03),
        case("oracle", "61 tokens, 23 features to 31, rank 8", drawn(61, size=23, out=31, r=8)),
        case("oracle", "gradients by small differences", drawn(3, size=4, out=3), lambda **_: {
            "the gradients are those of small differences": True}, "torch.autograd.gradcheck", checked),
        case("budget", "what the forward pass makes", large(False), small, CONTRACT, memory),
        case("budget", "what both passes make", large(True), small, CONTRACT, memory),
    ],
)  # fmt: skip
