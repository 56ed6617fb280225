"""Check of 01.apply_update. Oracle: torch's own optimizers on the mean loss of one batch.

Tolerances. Worked examples are float64 arithmetic on a handful of digits: 1e-12. The oracle divides before its backward where
the answer divides after, so gradients differ in the last digit (1e-12); AdamW divides by their root mean square, which
keeps that, and two updates may double it: 1e-11, and 1e-14 for gradients near 0. AdamW's first step is lr up to its epsilon
of 1e-8 beside gradients of 3 and more: 1e-8.
"""

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from shared.course.checking import Case, Check

from .pieces import (
    FROZEN_STATE,
    Deep,
    TinyModel,
    Weight,
    gradients,
    joined,
    mean_loss_by_torch,
    next_token_loss,
    state,
    uneven,
    weights,
    with_gradient,
)

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
    """Data parallelism sees gradients through views of its own, here one that was made before the update."""
    before, view = model.weight.grad, model.weight.grad.detach()
    function(model, optimizer, token_count)
    return {"the gradient is the tensor that it was": model.weight.grad is before, "what a view of its memory sees": view}


class Values(nn.Module):
    """Several numbers as one weight."""

    def __init__(self, values: Tensor):
        super().__init__()
        self.weight = nn.Parameter(values)


def values(weight: list, gradient: list, token_count: int, dtype=torch.float64, transposed: bool = False):
    """A weight of several numbers with a gradient, SGD with lr 0.5; transposed: the gradient lies in memory column by column."""

    def given():
        model = Values(torch.tensor(weight, dtype=dtype))
        model.weight.grad = torch.tensor(gradient, dtype=dtype)
        if transposed:
            model.weight.grad = model.weight.grad.t().contiguous().t()
        return {"model": model, "optimizer": SGD(model.parameters(), lr=0.5), "token_count": torch.tensor(token_count)}

    return given


def moved(weight: list, gradient: list, dtype=torch.float64):
    return lambda **given: {"weight": torch.tensor(weight, dtype=dtype), "gradient of weight": torch.tensor(gradient, dtype=dtype)}


def deep_in_two_groups():
    model = with_gradient(Deep(), 6.0)
    groups = [{"params": [model.first.weight]}, {"params": [model.block["inner"].weight], "lr": 0.2}]
    return {"model": model, "optimizer": SGD(groups, lr=0.1), "token_count": torch.tensor(3)}


def deep_in_part():
    """The optimizer has one of two weights; an earlier stage of a training leaves such."""
    model = with_gradient(Deep(), 6.0)
    return {"model": model, "optimizer": SGD([model.first.weight], lr=0.1), "token_count": torch.tensor(3)}


def deep_numbers(first: float, inner: float):
    names = {"first.weight": first, "block.inner.weight": inner, "gradient of first.weight": 2.0, "gradient of block.inner.weight": 2.0}
    return lambda **given: {name: torch.tensor(value, dtype=torch.float64) for name, value in names.items()}


def frozen():
    model = Deep(frozen=True)
    model.first.weight.grad = torch.tensor(6.0, dtype=torch.float64)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "token_count": torch.tensor(3)}


def state_after(function, model, optimizer, token_count):
    function(model, optimizer, token_count)
    return state(model)


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
        return {"raised": type(error).__name__, **weights(model), **gradients(model), "optimizer steps": len(stepped)}
    return {**weights(model), **gradients(model), "optimizer steps": len(stepped)}


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
            lambda **given: {
                "the gradient is the tensor that it was": True, "what a view of its memory sees": torch.tensor(2.0, dtype=torch.float64),
            },
            CONTRACT, in_place, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "a gradient whose rows do not lie one after another",
            values([[1, 2, 3], [4, 5, 6]], [[6, 12, 18], [24, 30, 36]], 6, transposed=True),
            moved([[0.5, 1, 1.5], [2, 2.5, 3]], [[1, 2, 3], [4, 5, 6]]), "arithmetic", update, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "weights below the top level, one of them in two places, two groups in the optimizer", deep_in_two_groups,
            deep_numbers(1.8, 2.6), "arithmetic: 2 - 0.1 * 2 and 3 - 0.2 * 2", update, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "a gradient of the model that the optimizer does not have is divided too", deep_in_part,
            deep_numbers(1.8, 3.0), "the contract: the gradients are those of the model's parameters", update, changes=("model",),
            rtol=1e-12,
        ),
        Case(
            "property", "a frozen weight, and a block in evaluation mode, stay so", frozen, lambda **given: FROZEN_STATE,
            "the contract: modes and `requires_grad` are the caller's", state_after, changes=("model",),
        ),
        Case(
            "property", "large gradients, NaN and infinity are divided like any other",
            values([1, 1, 1, 1], [6e9, float("nan"), float("inf"), 6], 3),
            moved([1 - 1e9, float("nan"), -float("inf"), 0], [2e9, float("nan"), float("inf"), 2]),
            "arithmetic; who wants to clip or skip hands over another updater", update, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "float16 gradients and 100,000 tokens, more than float16 can hold",
            values([1, 2], [50_000, 25_000], 100_000, torch.float16),
            moved([0.75, 1.875], [0.5, 0.25], torch.float16), "arithmetic: 50,000 / 100,000", update, changes=("model",), rtol=2**-10,
        ),
        Case(
            "property", "16,777,217 tokens, which float32 cannot tell from 16,777,216", values([5], [3 * 16_777_217], 16_777_217),
            moved([3.5], [3]), "arithmetic", update, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "a parameter without a gradient is left alone", three_weights, unused_left_alone,
            "the contract; for the others AdamW's paper: decay, then lr against the gradient's sign", update,
            changes=("model",), rtol=1e-8,
        ),
        Case(
            "property", "a count of 0 is refused before anything changes", one_weight(6.0, 0),
            lambda **given: {"raised": "ValueError", **numbers(2.0, 6.0)(), "optimizer steps": 0}, CONTRACT, refused, changes=("model",),
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
