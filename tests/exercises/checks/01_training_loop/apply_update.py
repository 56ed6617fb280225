"""Check of 01.apply_update. Oracle: torch's own optimizers on the mean loss of one batch.

Tolerances. Worked examples are float64 arithmetic on a handful of digits: 1e-12. The oracle divides before its backward where
the answer divides after, so gradients differ in the last digit (1e-12); AdamW divides by their root mean square, which
keeps that, and two updates may double it: 1e-11, and 1e-14 for gradients near 0. AdamW's first step is lr up to its epsilon
of 1e-8 beside gradients of 3 and more: 1e-8.
"""

import torch
from torch import nn
from torch.optim import SGD, AdamW

from shared.course.checking import Case, Check

from .pieces import TinyModel, Weight, gradients, joined, mean_loss_by_torch, next_token_loss, uneven, weights, with_gradient

CONTRACT = "the contract"
ORACLE = "torch: backward of the mean loss, then the same optimizer's step"
BATCH = joined(uneven(5, 22, 13))  # 40 targets count


class ThreeWeights(nn.Module):
    """A model whose `unused` weight took no part in the loss: it has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (1.0, 5.0, -3.0))
        self.first.grad, self.last.grad = torch.tensor(60.0, dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64)


def one_weight(gradient: float, token_count: int):
    """A weight of 2 with a gradient, SGD with lr 0.1."""

    def given():
        model = with_gradient(Weight(), gradient)
        return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "token_count": torch.tensor(token_count)}

    return given


def three_weights():
    model = ThreeWeights()
    return {"model": model, "optimizer": AdamW(model.parameters(), lr=0.1, weight_decay=0.5), "token_count": torch.tensor(3)}


def without_unused():
    given = three_weights()
    del given["model"].unused
    return given | {"optimizer": SGD(given["model"].parameters(), lr=0.1)}


def language_model(make_optimizer):
    def given():
        model = TinyModel()
        return {"model": model, "optimizer": make_optimizer(model.parameters()), "token_count": torch.tensor(40)}

    return given


def update(function, model, optimizer, token_count):
    function(model, optimizer, token_count)
    return weights(model) | gradients(model)


def in_place(function, model, optimizer, token_count):
    before = model.weight.grad
    function(model, optimizer, token_count)
    return {"the gradient is the tensor that it was": model.weight.grad is before}


def steps(function, model, optimizer, token_count):
    found = []
    optimizer.register_step_pre_hook(lambda *_: found.append(f"{model.first.grad:g} and {model.last.grad:g}"))
    function(model, optimizer, token_count)
    return {"gradients of first and last as optimizer.step() finds them": found}


def refused(function, model, optimizer, token_count):
    stepped = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(True))
    try:
        function(model, optimizer, token_count)
    except ValueError as error:
        return {"raised": type(error).__name__, "weight": model.weight.detach(), "optimizer steps": len(stepped)}
    return {"weight": model.weight.detach(), "optimizer steps": len(stepped)}


def numbers(weight: float, gradient: float):
    values = {"weight": weight, "gradient of weight": gradient}
    return lambda **given: {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def two_updates(function, model, optimizer, token_count):
    """The gradient of the sum over a batch, an update, and both again at the new weights."""
    for _ in range(2):
        optimizer.zero_grad()
        next_token_loss(model, BATCH).loss_sum.backward()
        function(model, optimizer, token_count)
    return weights(model) | gradients(model)


def two_updates_by_torch(model, optimizer, token_count):
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss_by_torch(model, BATCH).backward()
        optimizer.step()
    return weights(model) | gradients(model)


def unused_left_alone(model, optimizer, token_count):
    """AdamW's first step: decay by lr * weight_decay, then lr against the gradient's sign."""
    values = {"first": 0.95 - 0.1, "unused": 5.0, "last": -3 * 0.95 - 0.1, "gradient of first": 20.0, "gradient of last": 3.0}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()} | {"gradient of unused": None}


CHECK = Check(
    exercise="01.apply_update",
    outputs=(),
    spoilt=("gradients of model", "update of model"),
    cases=[
        Case(
            "worked example", "one token: the gradient stays 6, the weight goes from 2 to 2 - 0.1 * 6", one_weight(6.0, 1),
            numbers(1.4, 6.0), "arithmetic", update, changes=("model",), rtol=1e-12,
        ),
        Case(
            "worked example", "three tokens: the gradient becomes 2, the weight goes from 2 to 2 - 0.1 * 2", one_weight(6.0, 3),
            numbers(1.8, 2.0), "arithmetic: 6 / 3 = 2", update, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "the optimizer steps once, and finds the divided gradients", without_unused,
            lambda **given: {"gradients of first and last as optimizer.step() finds them": ["20 and 3"]}, CONTRACT, steps,
            changes=("model",),
        ),
        Case(
            "property", "the division is in place", one_weight(6.0, 3),
            lambda **given: {"the gradient is the tensor that it was": True}, CONTRACT, in_place, changes=("model",),
        ),
        Case(
            "property", "a parameter without a gradient is left alone", three_weights, unused_left_alone,
            "the contract; for the others AdamW's paper: decay, then lr against the gradient's sign", update,
            changes=("model",), rtol=1e-8,
        ),
        Case(
            "property", "a count of 0 is refused before anything changes", one_weight(6.0, 0),
            lambda **given: {"raised": "ValueError", "weight": torch.tensor(2.0, dtype=torch.float64), "optimizer steps": 0}, CONTRACT,
            refused, changes=("model",),
        ),
        Case(
            "oracle", "two updates of SGD with momentum", language_model(lambda p: SGD(p, lr=0.3, momentum=0.9)),
            two_updates_by_torch, ORACLE, two_updates, changes=("model",), rtol=1e-11, atol=1e-14,
        ),
        Case(
            "oracle", "two updates of AdamW with weight decay", language_model(lambda p: AdamW(p, lr=0.01, weight_decay=0.1)),
            two_updates_by_torch, ORACLE, two_updates, changes=("model",), rtol=1e-11, atol=1e-14,
        ),
    ],
)
