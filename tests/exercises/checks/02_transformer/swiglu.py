"""Check of 02.swiglu. Oracle: torch.nn.functional.glu, which multiplies one half of a tensor by the sigmoid of the other.

silu(g) * u is g * u * sigmoid(g), so glu of (g * u, g) side by side is what stands before the last projection.
Tolerances. Products in another order: 1e-12 in float64, 1e-6 in float32, with 1e-14 for gradients near 0.
"""

import torch
import torch.nn.functional as F
from torch import nn

from shared.course.checking import Case, Check

from .common import randn

CONTRACT = "the contract"
ORACLE = "torch.nn.functional.glu on (gate * up, gate)"


class Layers(nn.Module):
    """gate and up: 5 -> 7; down: 7 -> 3. They count their calls."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False, dtype=dtype) for sizes in ((5, 7), (5, 7), (7, 3)))
        for seed, layer in enumerate((self.gate, self.up, self.down)):
            layer.weight.data = randn(*layer.weight.shape, seed=seed, dtype=dtype)
        self.calls = []

    def parts(self) -> dict:
        return {name: self.counted(name) for name in ("gate", "up", "down")}

    def counted(self, name: str):
        def call(x):
            self.calls.append(name)
            return getattr(self, name)(x)

        return call


def random(*shape: int, dtype=torch.float64, **more):
    return lambda: {"x": randn(*shape, 5, seed=13, dtype=dtype), "layers": Layers(dtype)} | more


def call(function, x, layers, **more):
    return {"result": function(x, **layers.parts(), **more)}


def numbers(x: list, **more):
    functions = {"gate": lambda x: 10 * x, "up": lambda x: x + 2, "down": lambda x: 2 * x}
    return lambda: {"x": torch.tensor(x)} | functions | more


def answer(*values: float):
    return lambda **given: {"result": torch.tensor(values)}


def by_torch(x, layers):
    gate, up = layers.gate(x), layers.up(x)
    return layers.down(F.glu(torch.cat([gate * up, gate], dim=-1), dim=-1))


def result_by_torch(x, layers):
    return {"result": by_torch(x, layers)}


def same(x):
    return x


def gradients_of_x(function, x, **layers):
    leaf = x.clone().requires_grad_()
    out = function(leaf, **layers)
    (out * randn(*out.shape, seed=97)).sum().backward()
    return {"result": out.detach(), "gradient of x": leaf.grad}


def kept_case(title: str, activation) -> Case:
    """The activation's backward pass needs what it returned; torch.addcmul is the product in one kernel."""
    functions = {"gate": lambda x: 2 * x, "up": lambda x: x + 1, "down": lambda x: 3 * x, "activation": activation}

    def oracle(x, gate, up, down, activation):
        return down(torch.addcmul(torch.zeros_like(x), activation(gate(x)), up(x)))

    def given():
        return {"x": randn(7, seed=21)} | functions

    return Case("property", title, given, lambda **g: gradients_of_x(oracle, **g), "torch.addcmul", observe=gradients_of_x, rtol=1e-12)


def by_erf(x, layers, activation):
    """GELU by its definition: x times the normal distribution's cumulative function."""
    gate = layers.gate(x)
    return {"result": layers.down(gate * torch.special.ndtr(gate) * layers.up(x))}


def how_often(function, x, layers):
    function(x, **layers.parts())
    return {"calls": sorted(layers.calls)}


def gradients(function, x, layers):
    leaf = x.clone().requires_grad_()
    out = function(leaf, layers)
    (out * randn(*out.shape, seed=97)).sum().backward()
    return {"gradient of x": leaf.grad} | {f"gradient of {name}": p.grad for name, p in layers.named_parameters()}


CHECK = Check(
    exercise="02.swiglu",
    outputs=("result",),
    spoilt=("result", "gradients through result"),
    cases=[
        Case(
            "shape and dtype",
            "numbers for layers",
            numbers([1.0, -1.0, 0.5]),
            lambda **given: {"result": torch.zeros(3)},
            CONTRACT,
        ),
        Case("shape and dtype", "[2, 3, 5] to [2, 3, 3]", random(2, 3), result_by_torch, CONTRACT, observe=call),
        Case(
            "worked example",
            "gate 10 x, up x + 2, down 2 x at 1 and at -1",
            numbers([1.0, -1.0]),
            answer(59.9972762, -0.00090796),
            "arithmetic: 10 * sigmoid(10) = 9.9995460, times 3, times 2; and -10 * sigmoid(-10) * 1 * 2",
            atol=1e-8,
        ),
        Case(
            "worked example",
            "gate 10 x, up x + 2, down 2 x at 0.1",
            numbers([0.1]),
            answer(3.0704462),
            "arithmetic: sigmoid(1) = 0.7310586, times 2.1, times 2",
        ),
        Case(
            "worked example",
            "with a square as activation",
            numbers([1.0, 3.0], activation=lambda x: x * x),
            answer(600.0, 9000.0),
            "arithmetic: 2 * 10^2 * 3 and 2 * 30^2 * 5",
        ),
        Case(
            "property",
            "each layer is called once",
            random(2, 3),
            lambda x, layers: {"calls": ["down", "gate", "up"]},
            CONTRACT,
            observe=how_often,
            changes=("layers",),
        ),
        Case(
            "property",
            "a gate and an activation that return their input itself",
            lambda: {"x": torch.tensor([2.0, 3.0]), "gate": same, "up": same, "down": same, "activation": same},
            answer(4.0, 9.0),
            "the contract: x is left unchanged; 2 * 2 and 3 * 3",
        ),
        Case(
            "property",
            "a gate that returns its input itself, with SiLU",
            lambda: {"x": torch.tensor([2.0, 3.0]), "gate": same, "up": lambda x: x + 1, "down": same},
            answer(5.2847825, 11.4308893),
            "the contract: x is left unchanged; 2 * sigmoid(2) * 3 and 3 * sigmoid(3) * 4",
        ),
        Case(
            "property",
            "an up projection that returns its input itself",
            lambda: {"x": torch.tensor([2.0, 3.0]), "gate": lambda x: 2 * x, "up": same, "down": same, "activation": lambda x: x + 1},
            answer(10.0, 21.0),
            "the contract: x is left unchanged; 5 * 2 and 7 * 3",
        ),
        kept_case("gradients with ReLU", torch.relu),
        kept_case("gradients with tanh", torch.tanh),
        Case("oracle", "float64", random(2, 3), result_by_torch, ORACLE, observe=call, rtol=1e-12),
        Case("oracle", "float32", random(11, 13, dtype=torch.float32), result_by_torch, ORACLE, observe=call, rtol=1e-5, atol=1e-6),
        Case(
            "oracle",
            "GeGLU: another activation",
            random(2, 3, activation=F.gelu),
            by_erf,
            "GELU by torch.special.ndtr",
            observe=call,
            rtol=1e-11,
        ),
        Case(
            "oracle",
            "gradients of x and of the three weights",
            random(2, 3),
            lambda x, layers: gradients(by_torch, x, layers),
            ORACLE,
            observe=lambda function, x, layers: gradients(lambda x, layers: function(x, **layers.parts()), x, layers),
            changes=("layers",),
            rtol=1e-11,
            atol=1e-14,
        ),
    ],
)
