"""Check of 01.train_step. Oracle: PyTorch's usual loop (zero_grad, mean loss of one batch, backward, step), three times.

Tolerances. The recorder deals in small whole numbers: exact. Against the oracle, micro-batches are added in another order and
divided at another place: 1e-13 in a gradient, which three steps of momentum or AdamW pass on: 1e-11, and 1e-14 for values
near 0.
"""

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from shared.course.checking import Case, Check
from shared.loop import accumulate_gradients, apply_update, keep_totals
from shared.totals import Totals

from .pieces import (
    FROZEN_STATE,
    Deep,
    TinyModel,
    Weight,
    digits,
    gradients,
    joined,
    mean_loss_by_torch,
    next_token_loss,
    product_sum,
    state,
    totals_by_torch,
    uneven,
    weights,
    with_gradient,
)

CONTRACT = "the contract"
ORACLE = "torch: zero_grad, mean loss of one batch, backward, optimizer.step"
STEPS = [(5, 2), (1, 22, 0, 13), (22, 3)]  # counted targets of each micro-batch of each step


class Recorder:
    """A runner, a reducer and an updater that note what they are given, and add to the gradient in digits."""

    def __init__(self, model: Weight, names: dict[str, object], reduced: Totals, gradient: float):
        self.model, self.names = model, {id(value): name for name, value in names.items()}
        self.microbatches, self.reduced, self.gradient = names["microbatches"], reduced, gradient
        self.calls, self.found, self.returned = [], [], []

    def runner(self, model, microbatches, objective) -> Totals:
        """Notes its call, adds 30 to the gradient and returns 3 nats over 1 token."""
        self.note(f"runner({self.name(model)}, {self.name(microbatches)}, {self.name(objective)})")
        return self.add(30.0, totals(3.0, 1), "the runner's totals")

    def reducer(self, model, totals_of_this_rank) -> Totals:
        """Notes its call, adds to the gradient (400, if the case says nothing else) and returns totals of its own."""
        self.note(f"reducer({self.name(model)}, {self.name(totals_of_this_rank)})")
        return self.add(self.gradient, self.reduced, "the reducer's totals")

    def updater(self, model, optimizer, token_count) -> None:
        """Notes its call and leaves the weights alone."""
        self.note(f"updater({self.name(model)}, {self.name(optimizer)}, {self.name(token_count)})")

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.found.append(gradient_found(self.model))

    def add(self, gradient: float, result: Totals, name: str) -> Totals:
        self.model.weight.grad = torch.tensor(gradient + gradient_found(self.model), dtype=torch.float64)
        self.names[id(result)] = name
        self.returned.append(result)  # kept alive, so that nothing else gets its id
        return result

    def name(self, value) -> str:
        if isinstance(value, list | tuple) and [*map(id, value)] == [*map(id, self.microbatches)]:
            return "microbatches"  # or a copy of the list
        return f"{value.item()} tokens" if isinstance(value, Tensor) else self.names.get(id(value), "something else")


def totals(loss_sum: float, token_count: int) -> Totals:
    tokens = torch.tensor(token_count)
    return Totals(torch.tensor(loss_sum, dtype=torch.float64), tokens, {"tokens": tokens})


def gradient_found(model: Weight) -> float:
    return 0.0 if model.weight.grad is None else model.weight.grad.item()


def recorded(earlier: float = 0.0, loss_sum: float = 33.0, token_count: int = 10, gradient: float = 400.0):
    """A step of the recorder's parts, where an earlier step left the gradient `earlier`; the others are the reducer's."""

    def given():
        model = with_gradient(Weight(), earlier)
        optimizer, microbatches = SGD(model.parameters(), lr=0.1), digits(2)
        known = {"model": model, "optimizer": optimizer, "microbatches": microbatches, "objective": product_sum}
        recorder = Recorder(model, known, totals(loss_sum, token_count), gradient)
        return known | {"runner": recorder.runner, "reducer": recorder.reducer, "updater": recorder.updater}

    return given


def calls(function, updater, **given):
    function(updater=updater, **given)
    return {"calls": updater.__self__.calls}


def found(function, model, updater, **given):
    function(model=model, updater=updater, **given)
    runner, reducer, update = updater.__self__.found
    return {
        "gradient that the runner finds": runner, "gradient that the reducer finds": reducer,
        "gradient that the updater finds": update, "gradient afterwards": gradient_found(model), "weight afterwards": model.weight.item(),
    }


def found_in_digits(**given):
    return {
        "gradient that the runner finds": 0.0, "gradient that the reducer finds": 30.0,
        "gradient that the updater finds": 430.0, "gradient afterwards": 430.0, "weight afterwards": 2.0,
    }


def named_calls(tokens: int = 10):
    return lambda **given: {"calls": [
        "runner(model, microbatches, objective)", "reducer(model, the runner's totals)", f"updater(model, optimizer, {tokens} tokens)",
    ]}


PARTS = {"objective": product_sum, "runner": accumulate_gradients, "reducer": keep_totals, "updater": apply_update}


def deep_in_two_groups():
    model = with_gradient(Deep(), 9.0)
    groups = [{"params": [model.first.weight]}, {"params": [model.block["inner"].weight], "lr": 0.2}]
    return {"model": model, "optimizer": SGD(groups, lr=0.1), "microbatches": digits(1, 1)} | PARTS


def moved(**given):
    values = {"first.weight": 2 - 0.1 * 11, "block.inner.weight": 3 - 0.2 * 5.5}
    values |= {"gradient of first.weight": 11.0, "gradient of block.inner.weight": 5.5}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def weights_and_gradients(function, model, **given):
    function(model=model, **given)
    return weights(model) | gradients(model)


def frozen():
    model = Deep(frozen=True)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "microbatches": digits(1, 1)} | PARTS


def state_after(function, model, **given):
    function(model=model, **given)
    return state(model)


def nothing_counts():
    model = TinyModel()
    parts = {"microbatches": uneven(0, 0), "objective": next_token_loss}
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)} | PARTS | parts


def language_model(make_optimizer):
    """The core's own runner, reducer and updater; an earlier step left gradients in every parameter."""

    def given():
        model = with_gradient(TinyModel(), 9.0)
        return {
            "model": model, "optimizer": make_optimizer(model.parameters()),
            "microbatches": uneven(*STEPS[0]), "objective": next_token_loss,
            "runner": accumulate_gradients, "reducer": keep_totals, "updater": apply_update,
        }

    return given


def one_step(function, model, **given):
    return {"totals": function(model=model, **given), **weights(model), **gradients(model)}


def one_step_by_torch(model, optimizer, microbatches, **parts):
    expected = {"totals": totals_by_torch(model, microbatches)}
    plain_step(model, optimizer, microbatches)
    return expected | weights(model) | gradients(model)


def three_steps(function, model, microbatches, **given):
    losses = [function(model=model, microbatches=uneven(*counted), **given).mean_loss for counted in STEPS]
    return {"mean losses": torch.tensor(losses, dtype=torch.float64), **weights(model), **gradients(model)}


def three_steps_by_torch(model, optimizer, **parts):
    losses = [plain_step(model, optimizer, uneven(*counted)) for counted in STEPS]
    return {"mean losses": torch.tensor(losses, dtype=torch.float64), **weights(model), **gradients(model)}


def plain_step(model, optimizer, microbatches) -> float:
    optimizer.zero_grad()
    loss = mean_loss_by_torch(model, joined(microbatches))
    loss.backward()
    optimizer.step()
    return loss.item()


def optimizer_steps(function, optimizer, **given):
    made = []
    optimizer.register_step_pre_hook(lambda *_: made.append(1))
    function(optimizer=optimizer, **given)
    return {"calls of optimizer.step()": len(made)}


def plain_case(title: str, make_optimizer, expected, observe) -> Case:
    return Case("oracle", title, language_model(make_optimizer), expected, ORACLE, observe, changes=("model",), rtol=1e-11, atol=1e-14)


CHECK = Check(
    exercise="01.train_step",
    outputs=("totals",),
    spoilt=("totals.loss_sum", "totals.token_count", "totals.metrics", "gradients of model", "update of model"),
    cases=[
        Case("shape and dtype", "what is returned", recorded(), lambda **given: {"totals": totals(33.0, 10)}, CONTRACT),
        Case(
            "worked example", "who is called, in which order, with what", recorded(),
            named_calls(),
            "the contract: run, reduce, update by the reduced count", calls,
        ),
        Case(
            "worked example", "the totals are the reducer's", recorded(), lambda **given: {"totals": totals(33.0, 10)},
            "the contract: the reduced totals",
        ),
        Case(
            "property", "the gradient on its way: 30 from the runner, 400 from the reducer, left for monitoring", recorded(),
            found_in_digits, "arithmetic: 0, 30, 30 + 400", found,
        ),
        Case(
            "property", "an earlier step left a gradient of 5", recorded(earlier=5.0), found_in_digits,
            "the contract: an earlier step's gradient is not in this one's", found,
        ),
        Case(
            "property", "no token counts: the updater is called all the same, and decides", recorded(token_count=0), named_calls(0),
            "the contract: run, reduce, update", calls,
        ),
        Case(
            "property", "no token counts: what the updater raises comes through", nothing_counts, lambda **given: {"raised": "ValueError"},
            "the contract: apply_update refuses a count of 0", changes=("model",),
        ),
        Case(
            "property", "a loss and a gradient of NaN: the updater is called all the same",
            recorded(loss_sum=float("nan"), gradient=float("nan")), named_calls(), "the contract: run, reduce, update", calls,
        ),
        Case(
            "property", "a gradient of NaN reaches the updater as it is", recorded(gradient=float("nan")),
            lambda **given: found_in_digits() | {
                "gradient that the updater finds": float("nan"), "gradient afterwards": float("nan"),
            },
            "the contract: nothing happens to the gradients between reducer and updater", found,
        ),
        Case(
            "property", "weights below the top level, one of them in two places, two groups in the optimizer", deep_in_two_groups, moved,
            "arithmetic: gradients 22 / 2 and 11 / 2, rates 0.1 and 0.2", weights_and_gradients, changes=("model",), rtol=1e-12,
        ),
        Case(
            "property", "a frozen weight, and a block in evaluation mode, stay so", frozen, lambda **given: FROZEN_STATE,
            "the contract: modes and `requires_grad` are the caller's", state_after, changes=("model",),
        ),
        plain_case("one step of SGD, earlier gradients of 9 everywhere", lambda p: SGD(p, lr=0.3), one_step_by_torch, one_step),
        plain_case("three steps of SGD with momentum", lambda p: SGD(p, lr=0.3, momentum=0.9), three_steps_by_torch, three_steps),
        plain_case(
            "three steps of AdamW with weight decay", lambda p: AdamW(p, lr=0.01, weight_decay=0.1), three_steps_by_torch, three_steps,
        ),
        Case(
            "budget", "the optimizer steps once", language_model(lambda p: SGD(p, lr=0.3)),
            lambda **given: {"calls of optimizer.step()": 1}, "the contract: the updater steps", optimizer_steps, changes=("model",),
        ),
    ],
)
