"""Check of 01.accumulate_gradients. Oracle: one backward pass of torch over one big batch.

Tolerances. With powers of ten in float64 every sum is exact. Against the oracle, sums of at most 66 terms are added in another
order: 1e-12 relative, and 1e-13 beside it for gradients near 0.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check
from shared.course.comparing import flatten
from shared.totals import Totals

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
    next_token_loss,
    not_a_number,
    product_sum,
    state,
    totals_by_torch,
    uneven,
    with_gradient,
)

CONTRACT = "the contract"
COUNT = "totals.token_count"
ORACLE = "torch: backward of the summed loss of all micro-batches as one batch"


def one_weight(*sizes: int, gradient: float | None = None, objective=product_sum, container=list):
    """A model of one weight (2.0) and micro-batches that weigh 1, 10, 100, ..."""

    def given():
        model = Weight() if gradient is None else with_gradient(Weight(), gradient)
        return {"model": model, "microbatches": container(digits(*sizes)), "objective": objective}

    return given


def watched(*sizes: int, objective=product_sum):
    return lambda: {"model": Weight(), "microbatches": digits(*sizes), "objective": Watched(objective)}


def language_model(*counted: int):
    return lambda: {"model": TinyModel(), "microbatches": uneven(*counted), "objective": next_token_loss}


def deep(frozen: bool = False):
    return lambda: {"model": Deep(frozen), "microbatches": digits(1, 2), "objective": product_sum}


def same_count():
    return {"model": Weight(), "microbatches": digits(1, 1, 1), "objective": SameCount()}


def same_twice():
    return {"model": Weight(), "microbatches": digits(3) * 2, "objective": product_sum}


def float32():
    given = in_float32()
    return {"model": given["model"], "microbatches": given["batches"], "objective": product_sum}


def states(function, model, microbatches, objective):
    """The modules' modes and what learns, at each call of the objective and afterwards."""
    found = []

    def noted(model, microbatch):
        found.append(state(model))
        return objective(model, microbatch)

    function(model, microbatches, noted)
    return {"at the first call": found[0], "at the second call": found[1], "afterwards": state(model)}


def run(function, model, microbatches, objective):
    return {"totals": function(model, microbatches, objective), **gradients(model)}


def sums(loss_sum: float, token_count: int, gradient: float, x: float):
    def expected(**given):
        numbers = [torch.tensor(value, dtype=torch.float64) for value in (loss_sum, x, gradient)]
        totals = {"loss_sum": numbers[0], "token_count": torch.tensor(token_count), "metrics": {"x": numbers[1]}}
        return {"totals": totals, "gradient of weight": numbers[2]}

    return expected


def by_torch(model, microbatches, objective):
    batch = joined(microbatches)
    F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten(), reduction="sum").backward()
    return {"totals": totals_by_torch(model, microbatches), **gradients(model)}


def graph_left(function, **given):
    return {"the totals hold a graph": holds_graph(function(**given))}


def calls(function, model, microbatches, objective):
    function(model, microbatches, objective)
    return {"sums of x, call by call": objective.sums, "gradient found at each call": objective.gradients}


def held(function, model, microbatches, objective):
    function(model, microbatches, objective)
    return {"earlier graphs still held at each call": objective.held}


def pile_up(function, model, microbatches, objective):
    function(model, microbatches, objective)
    return {"more than one earlier graph is held at the last call": objective.held[-1] > 1}


def product_sum_with_live_metric(model, batch) -> Totals:
    """Like product_sum; its metric `square`, the sum of (weight * x)**2, was not detached from its graph."""
    return product_sum(model, batch)._replace(metrics={"square": model(batch["x"]).square().sum()})


CHECK = Check(
    exercise="01.accumulate_gradients",
    outputs=("totals",),
    spoilt=("totals.loss_sum", "totals.token_count", "totals.metrics", "gradients of model"),
    cases=[
        Case("shape and dtype", "one micro-batch", one_weight(1), sums(2, 1, 1, 1), CONTRACT, observe=run),
        Case(
            "worked example", "one micro-batch of three values that add up to 1", one_weight(3), sums(2, 3, 1, 1),
            "arithmetic: d(weight * 1)/d(weight) = 1", observe=run,
        ),
        Case(
            "worked example", "two micro-batches, of 1 value and of 3: sums 1 and 10", one_weight(1, 3), sums(22, 4, 11, 11),
            "arithmetic: 1 + 10 = 11", observe=run,
        ),
        Case(
            "property", "four micro-batches, of 3, 1, 5 and 2 values: sums 1, 10, 100, 1000", one_weight(3, 1, 5, 2),
            sums(2222, 11, 1111, 1111), "arithmetic: the sums add up to 1111", observe=run,
        ),
        Case(
            "property", "the micro-batches as a tuple", one_weight(1, 3, container=tuple), sums(22, 4, 11, 11),
            "the contract: any sequence", observe=run,
        ),
        Case(
            "property", "the gradient is added to the 5000 that is there", one_weight(1, 3, gradient=5000.0), sums(22, 4, 5011, 11),
            "the contract: on top of what is there", observe=run,
        ),
        Case(
            "property", "one call for each micro-batch, in order, each after the backward of the one before", watched(1, 3, 2),
            lambda **given: {"sums of x, call by call": [1, 10, 100], "gradient found at each call": [0, 1, 11]}, CONTRACT, observe=calls,
        ),
        Case(
            "property", "the totals are cut loose from the graphs", one_weight(1, 3, objective=product_sum_with_live_metric),
            lambda **given: {"the totals hold a graph": False}, CONTRACT, observe=graph_left,
        ),
        Case(
            "property", "weights below the top level, one of them in two places", deep(),
            lambda **given: {
                "totals": sums(77, 3, 0, 11)()["totals"], "gradient of first.weight": torch.tensor(22.0, dtype=torch.float64),
                "gradient of block.inner.weight": torch.tensor(11.0, dtype=torch.float64),
            },
            "arithmetic: 11 for each place in which a weight is used", observe=run,
        ),
        Case(
            "property", "a frozen weight, and a block in evaluation mode, stay so", deep(frozen=True),
            lambda **given: {"at the first call": FROZEN_STATE, "at the second call": FROZEN_STATE, "afterwards": FROZEN_STATE},
            "the contract: modes and `requires_grad` are the caller's", observe=states,
        ),
        Case(
            "property", "the same micro-batch given twice counts twice", same_twice, sums(4, 6, 2, 2), "arithmetic: 1 + 1", observe=run,
        ),
        Case(
            "property", "an objective that returns the same tensor as its count each time", same_count,
            sums(222, 3, 111, 111), "arithmetic: three values; what the objective returned is not to be added into", observe=run,
        ),
        Case(
            "property", "a loss of NaN is not hidden",
            lambda: {"model": Weight(), "microbatches": not_a_number(), "objective": product_sum},
            sums(float("nan"), 2, float("nan"), float("nan")), "the contract: totals and gradient are of all micro-batches", observe=run,
        ),
        Case(
            "property", "float32 stays float32", float32,
            lambda **given: {name: value.float() for name, value in flatten(sums(22, 2, 11, 11)()).items() if name != COUNT} | {
                COUNT: torch.tensor(2)
            },
            CONTRACT, observe=run,
        ),
        Case("oracle", "no target counts", language_model(0, 0), by_torch, ORACLE, run, rtol=1e-12, atol=1e-13),
        Case("oracle", "micro-batches with 5 and 2 counted targets", language_model(5, 2), by_torch, ORACLE, run, rtol=1e-12, atol=1e-13),
        Case(
            "oracle", "micro-batches with 1, 22, 0, 13 and 3 counted targets", language_model(1, 22, 0, 13, 3), by_torch, ORACLE, run,
            rtol=1e-12, atol=1e-13,
        ),
        Case(
            "budget", "the tensors of a micro-batch are freed before the next one", watched(1, 3, 2, 1),
            lambda **given: {"earlier graphs still held at each call": [0, 0, 0, 0]}, "the contract: only one graph is alive at a time",
            observe=held,
        ),
        Case(
            "budget", "nor do metrics that hold a graph pile up", watched(1, 3, 2, 1, objective=product_sum_with_live_metric),
            lambda **given: {"more than one earlier graph is held at the last call": False},
            "the contract: only one graph is alive at a time", observe=pile_up,
        ),
    ],
)
