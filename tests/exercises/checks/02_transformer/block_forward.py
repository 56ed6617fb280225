"""Check of 02.block_forward. Oracle: torch.nn.TransformerEncoderLayer, with norm_first and without.

Tolerances. The oracle is fed the same modules, so only the order of its sums differs: 1e-12 in float64, 1e-14 for gradients near 0.
"""

import torch
from torch import nn

from shared.course.checking import Case, Check

from .common import randn

CONTRACT = "the contract"
ORACLE = "torch.nn.TransformerEncoderLayer"


def minus_one(x):
    return x - 1


def double(x):
    return 2 * x


def plus_ten(x):
    return x + 10


def half(x):
    return x / 2


def numbers(x: list, *sublayers, pre_norm: bool):
    return lambda: {"x": torch.tensor(x), "sublayers": list(sublayers), "pre_norm": pre_norm}


def answer(*values: float):
    return lambda **given: {"result": torch.tensor(values)}


class Layer(nn.Module):
    """PyTorch's own block with random weights, and its parts as sublayers."""

    def __init__(self, pre_norm: bool):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True, norm_first=pre_norm, dtype=torch.float64)
        for seed, parameter in enumerate(self.block.parameters()):
            parameter.data = randn(*parameter.shape, seed=seed)

    def sublayers(self) -> list:
        block = self.block

        def attention(x):
            return block.self_attn(x, x, x, need_weights=False)[0]

        def feed_forward(x):
            return block.linear2(block.linear1(x).relu())

        return [(block.norm1, attention), (block.norm2, feed_forward)]


def encoder_layer(pre_norm: bool):
    return lambda: {"x": randn(3, 5, 8, seed=17), "layer": Layer(pre_norm), "pre_norm": pre_norm}


def call(function, x, layer, pre_norm):
    return {"result": function(x, layer.sublayers(), pre_norm)}


def by_torch(x, layer, pre_norm):
    return {"result": layer.block(x)}


def gradients(function, x, layer):
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    (out * randn(*out.shape, seed=97)).sum().backward()
    return {"gradient of x": leaf.grad} | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}


def order_of_calls(function, x, sublayers, pre_norm):
    calls = []

    def noting(name, inner):
        def noted(x):
            calls.append(name)
            return inner(x)

        return noted

    function(x, [(noting(f"norm {i}", norm), noting(f"sublayer {i}", layer)) for i, (norm, layer) in enumerate(sublayers, 1)], pre_norm)
    return {"calls": calls}


def order_case(title: str, pre_norm: bool, *names: str) -> Case:
    given = numbers([3.0], (minus_one, double), (half, plus_ten), pre_norm=pre_norm)
    return Case("property", title, given, lambda **_: {"calls": list(names)}, CONTRACT, observe=order_of_calls)


def same(x):
    return x


def gradients_of_x(function, x, sublayers, pre_norm):
    leaf = x.clone().requires_grad_()
    out = function(leaf + 0, sublayers, pre_norm)
    (out * randn(*out.shape, seed=97)).sum().backward()
    return {"result": out.detach(), "gradient of x": leaf.grad}


def kept_case(title: str, pre_norm: bool) -> Case:
    """Functions whose backward pass needs what they returned. x + (e^x - 1) and the like by torch.add."""
    sublayers = [(torch.tanh, torch.exp), (torch.sigmoid, torch.tanh)]

    def oracle(x, sublayers, pre_norm):
        for norm, sublayer in sublayers:
            x = torch.add(x, sublayer(norm(x))) if pre_norm else norm(torch.add(x, sublayer(x)))
        return x

    def given():
        return {"x": randn(7, seed=23), "sublayers": sublayers, "pre_norm": pre_norm}

    return Case("property", title, given, lambda **g: gradients_of_x(oracle, **g), "torch.add", observe=gradients_of_x, rtol=1e-12)


def gradient_case(title: str, pre_norm: bool) -> Case:
    return Case(
        "oracle",
        title,
        encoder_layer(pre_norm),
        lambda x, layer, pre_norm: gradients(layer.block, x, layer),
        ORACLE,
        observe=lambda function, x, layer, pre_norm: gradients(lambda leaf: function(leaf, layer.sublayers(), pre_norm), x, layer),
        changes=("layer",),
        rtol=1e-9,
        atol=1e-12,
    )


CHECK = Check(
    exercise="02.block_forward",
    outputs=("result",),
    spoilt=("result", "gradients through result"),
    cases=[
        Case("shape and dtype", "[2] numbers", numbers([3.0, 5.0], (minus_one, double), pre_norm=True), answer(0.0, 0.0), CONTRACT),
        Case("shape and dtype", "[3, 5, 8] in float64", encoder_layer(True), by_torch, CONTRACT, observe=call),
        Case(
            "worked example",
            "pre-norm with one sublayer",
            numbers([3.0], (minus_one, double), pre_norm=True),
            answer(7.0),
            "arithmetic: 3 + 2 * (3 - 1)",
        ),
        Case(
            "worked example",
            "post-norm with one sublayer",
            numbers([3.0], (minus_one, double), pre_norm=False),
            answer(8.0),
            "arithmetic: (3 + 2 * 3) - 1",
        ),
        Case(
            "worked example",
            "pre-norm with two sublayers",
            numbers([3.0], (minus_one, double), (half, plus_ten), pre_norm=True),
            answer(20.5),
            "arithmetic: 3 + 2 * (3 - 1) = 7, then 7 + (7 / 2 + 10)",
        ),
        Case(
            "worked example",
            "post-norm with two sublayers",
            numbers([3.0], (minus_one, double), (half, plus_ten), pre_norm=False),
            answer(13.0),
            "arithmetic: (3 + 2 * 3) - 1 = 8, then (8 + (8 + 10)) / 2",
        ),
        Case(
            "property",
            "three sublayers, as in a decoder that looks at an encoder",
            numbers([3.0], (minus_one, double), (half, plus_ten), (double, minus_one), pre_norm=True),
            answer(60.5),
            "arithmetic: 20.5 + (2 * 20.5 - 1)",
        ),
        Case("property", "without sublayers the stream passes", numbers([3.0], pre_norm=True), answer(3.0), "the contract"),
        order_case("pre-norm: who is called, and when", True, "norm 1", "sublayer 1", "norm 2", "sublayer 2"),
        order_case("post-norm: who is called, and when", False, "sublayer 1", "norm 1", "sublayer 2", "norm 2"),
        Case(
            "property",
            "pre-norm: a norm and a sublayer that return their input itself",
            numbers([3.0, 5.0], (same, same), (same, same), pre_norm=True),
            answer(12.0, 20.0),
            "the contract: x is left unchanged; twice doubled",
        ),
        Case(
            "property",
            "post-norm: a sublayer that returns its input itself",
            numbers([3.0, 5.0], (same, same), (minus_one, same), pre_norm=False),
            answer(11.0, 19.0),
            "the contract: x is left unchanged; 2 * 6 - 1 and 2 * 10 - 1",
        ),
        kept_case("pre-norm: gradients where backward needs what was returned", True),
        kept_case("post-norm: gradients where backward needs what was returned", False),
        Case("oracle", "pre-norm", encoder_layer(True), by_torch, f"{ORACLE}(norm_first=True)", observe=call, rtol=1e-9, atol=1e-12),
        Case("oracle", "post-norm", encoder_layer(False), by_torch, f"{ORACLE}(norm_first=False)", observe=call, rtol=1e-9, atol=1e-12),
        gradient_case("gradients, pre-norm", True),
        gradient_case("gradients, post-norm", False),
    ],
)
