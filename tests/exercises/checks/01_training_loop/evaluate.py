"""Check of 01.evaluate. Oracle: torch.nn.functional.cross_entropy(reduction="mean") over all held-out tokens at once.

Tolerances. Powers of ten in float64 add up exactly. Against the oracle, at most 66 losses are added in another order: 1e-12.
"""

import torch

from shared.course.checking import Case, Check

from .pieces import (
    FROZEN_STATE,
    Deep,
    SameCount,
    TinyModel,
    Watched,
    Weight,
    digits,
    gradients,
    holds_graph,
    in_float32,
    joined,
    mean_loss_by_torch,
    next_token_loss,
    not_a_number,
    product_sum,
    state,
    totals_by_torch,
    uneven,
    with_gradient,
)

CONTRACT = "the contract"
ORACLE = 'torch.nn.functional.cross_entropy(..., reduction="mean") over all tokens as one batch'


class SecondBatchBroken(Exception):
    """What the objective of one case raises."""


def one_weight(*sizes: int, training: bool = True, objective=product_sum, container=list):
    """A model of one weight (2.0) in training or evaluation mode, and batches that weigh 1, 10, 100, ..."""
    return lambda: {"model": Weight().train(training), "batches": container(digits(*sizes)), "objective": objective}


def watched(*sizes: int):
    return lambda: {"model": Weight(), "batches": digits(*sizes), "objective": Watched(product_sum)}


def language_model(*counted: int, dropout: float = 0.0):
    return lambda: {"model": TinyModel(dropout), "batches": uneven(*counted), "objective": next_token_loss}


def earlier_gradient():
    return {"model": with_gradient(Weight(), 5.0), "batches": digits(1, 2), "objective": product_sum}


def broken_second_batch(model, batch):
    """Raises at the second batch."""
    if batch["x"].sum() == 10:
        raise SecondBatchBroken("the second batch cannot be read")
    return product_sum(model, batch)


def frozen(objective=product_sum):
    return lambda: {"model": Deep(frozen=True), "batches": digits(1, 2), "objective": objective}


def same_count():
    return {"model": Weight(), "batches": digits(1, 1, 1), "objective": SameCount()}


def same_twice():
    return {"model": Weight(), "batches": digits(3) * 2, "objective": product_sum}


def float32():
    return in_float32() | {"objective": product_sum}


def sums(loss_sum: float, token_count: int, x: float):
    def expected(**given):
        loss_sum_and_x = [torch.tensor(value, dtype=torch.float64) for value in (loss_sum, x)]
        return {"totals": {"loss_sum": loss_sum_and_x[0], "token_count": torch.tensor(token_count), "metrics": {"x": loss_sum_and_x[1]}}}

    return expected


def mean(function, **given):
    return {"mean_loss": function(**given).mean_loss}


def with_mean(function, **given):
    totals = function(**given)
    return {"totals": totals, "mean_loss": totals.mean_loss}


def by_torch(model, batches, objective):
    model.eval()
    with torch.no_grad():
        return {"totals": totals_by_torch(model, batches), "mean_loss": mean_loss_by_torch(model, joined(batches)).item()}


def state_after(function, model, **given):
    try:
        function(model=model, **given)
    except SecondBatchBroken as error:
        return {"raised": type(error).__name__, **state(model)}
    return state(model)


def recording(function, **given):
    """Two evaluations, one where the caller records gradients and one where it does not."""
    with torch.enable_grad():
        function(**given)
        on = torch.is_grad_enabled()
    with torch.no_grad():
        function(**given)
        off = torch.is_grad_enabled()
    return {"where the caller records gradients, it does afterwards": on, "where it does not, it does afterwards": off}


def one_by_one(function, model, batches, objective):
    """How many batches were asked for by the time each of them is judged."""
    made, found = [], []

    def stream():
        for batch in batches:
            made.append(batch)
            yield batch

    def noted(model, batch):
        found.append(len(made))
        return objective(model, batch)

    function(model, stream(), noted)
    return {"batches asked for at each call": found}


def in_float32_too(**given):
    totals = sums(22, 2, 11)()["totals"]
    return {"totals": totals | {"loss_sum": totals["loss_sum"].float(), "metrics": {"x": totals["metrics"]["x"].float()}}}


def mode(function, model, **given):
    function(model=model, **given)
    return {"model.training afterwards": model.training}


def mode_after_error(function, model, **given):
    try:
        function(model=model, **given)
    except SecondBatchBroken as error:
        return {"raised": type(error).__name__, "model.training afterwards": model.training}
    return {"model.training afterwards": model.training}


def seen(function, objective, **given):
    function(objective=objective, **given)
    return {
        "sums of x, call by call": objective.sums,
        "model.training at each call": objective.training,
        "gradients recorded at each call": objective.recording,
    }


def graph(function, model, **given):
    return {"the totals hold a graph": holds_graph(function(model=model, **given)), **gradients(model)}


def mode_case(title: str, given, training: bool) -> Case:
    expected = {"model.training afterwards": training}
    return Case("property", title, given, lambda **given: expected, "the contract: left as it was found", mode, changes=("model",))


CHECK = Check(
    exercise="01.evaluate",
    outputs=("totals",),
    spoilt=("totals.loss_sum", "totals.token_count", "totals.metrics"),
    cases=[
        Case("shape and dtype", "one batch", one_weight(1), sums(2, 1, 1), CONTRACT),
        Case(
            "worked example", "one batch of three values that add up to 1", one_weight(3), sums(2, 3, 1),
            "arithmetic: 2 * 1, over 3 tokens",
        ),
        Case(
            "worked example", "batches of 3 and 1 values: sums 1 and 10", one_weight(3, 1), sums(22, 4, 11),
            "arithmetic: 2 * (1 + 10), over 4 tokens",
        ),
        Case(
            "worked example", "the mean loss of batches of 3 and 1 values", one_weight(3, 1), lambda **given: {"mean_loss": 5.5},
            "arithmetic: 22 / 4; the mean of the batches' means would be (2/3 + 20) / 2", mean,
        ),
        Case(
            "property", "four batches from a generator: sums 1, 10, 100, 1000", one_weight(3, 1, 5, 2, container=iter),
            sums(2222, 11, 1111), "arithmetic: 2 * 1111",
        ),
        Case(
            "property", "what the objective finds: each batch once, evaluation mode, no gradients recorded", watched(1, 3, 2),
            lambda **given: {
                "sums of x, call by call": [1, 10, 100], "model.training at each call": [False] * 3,
                "gradients recorded at each call": [False] * 3,
            },
            CONTRACT, seen,
        ),
        mode_case("a model in training mode is handed back in training mode", one_weight(1, 3), True),
        mode_case("a model in evaluation mode is handed back in evaluation mode", one_weight(1, 3, training=False), False),
        Case(
            "property", "the mode is put back where the objective raises", one_weight(1, 3, objective=broken_second_batch),
            lambda **given: {"raised": "SecondBatchBroken", "model.training afterwards": True},
            "the contract: left as it was found, also where the objective raises", mode_after_error, changes=("model",),
        ),
        Case(
            "property", "and a model in evaluation mode stays so where the objective raises",
            one_weight(1, 3, training=False, objective=broken_second_batch),
            lambda **given: {"raised": "SecondBatchBroken", "model.training afterwards": False},
            "the contract: left as it was found, also where the objective raises", mode_after_error, changes=("model",),
        ),
        Case(
            "property", "a block in evaluation mode inside a model in training mode, and a frozen weight, stay so", frozen(),
            lambda **given: FROZEN_STATE, "the contract: every module in the mode in which it was", state_after, changes=("model",),
        ),
        Case(
            "property", "they stay so where the objective raises", frozen(broken_second_batch),
            lambda **given: {"raised": "SecondBatchBroken", **FROZEN_STATE}, "the contract: also where the objective raises", state_after,
            changes=("model",),
        ),
        Case(
            "property", "whether gradients are recorded is afterwards as before", one_weight(1, 3),
            lambda **given: {
                "where the caller records gradients, it does afterwards": True, "where it does not, it does afterwards": False,
            },
            CONTRACT, recording,
        ),
        Case("property", "the same batch given twice counts twice", same_twice, sums(4, 6, 2), "arithmetic: 2 * (1 + 1)"),
        Case(
            "property", "an objective that returns the same tensor as its count each time", same_count,
            sums(222, 3, 111), "arithmetic: three values; what the objective returned is not to be added into",
        ),
        Case(
            "property", "a loss of NaN is not hidden",
            lambda: {"model": Weight(), "batches": not_a_number(), "objective": product_sum},
            sums(float("nan"), 2, float("nan")), "the contract: the totals over all batches",
        ),
        Case("property", "float32 stays float32", float32, in_float32_too, CONTRACT),
        Case(
            "property", "no target counts", language_model(0, 0),
            lambda model, batches, objective: {"totals": totals_by_torch(model, batches)}, ORACLE, rtol=1e-12,
        ),
        Case(
            "property", "gradients that are there stay as they are", earlier_gradient,
            lambda **given: {"the totals hold a graph": False, "gradient of weight": torch.tensor(5.0, dtype=torch.float64)},
            CONTRACT, graph,
        ),
        Case(
            "oracle", "dropout off, batches with 5 and 2 counted targets", language_model(5, 2, dropout=0.5), by_torch, ORACLE, with_mean,
            rtol=1e-12,
        ),
        Case(
            "oracle", "batches with 22, 22, 0, 13 and 3 counted targets", language_model(22, 22, 0, 13, 3), by_torch, ORACLE, with_mean,
            rtol=1e-12,
        ),
        Case(
            "budget", "a generator's batches are asked for one by one", one_weight(1, 3, 2),
            lambda **given: {"batches asked for at each call": [1, 2, 3]}, "the contract: taken one by one", one_by_one,
        ),
    ],
)
