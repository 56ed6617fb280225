"""Stage 5 of build 01: bits per byte of a text, and a model that is left as it was found."""

import math
from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import (
    NEAR,
    TEXT,
    WITHIN,
    Averages,
    Recorded,
    Results,
    Table,
    budget,
    gradients_of,
    made,
    modes_of,
    randn,
    text_of,
    weights_of,
)
from .watching import Watch

SAYS = TEXT.format(5)


def bits_case(title: str, size: int, length: int, rows: int, kind: Callable[[], Recorded] = Averages, seed: int = 0) -> Case:
    """Each window alone, and one division at the end."""
    text = text_of(size, seed)

    def expected(**_: Any) -> Results:
        model, bits = made(kind).eval(), []
        with torch.no_grad():
            for first in range(0, size - 1, length):
                window = text[first : first + length + 1].long()
                found = torch.distributions.Categorical(logits=model(window[None, :-1])[0])
                bits.append(-found.log_prob(window[1:]) / math.log(2))
        return {"bits per byte": torch.cat(bits).mean()}

    def observe(adapters: Any, **_: Any) -> Results:
        return {"bits per byte": torch.as_tensor(adapters.evaluate(made(kind), text.clone(), length, rows), dtype=torch.float64)}

    given = {"bytes": size, "length": length, "rows": rows, "windows": math.ceil((size - 1) / length)}
    return Case("oracle", title, lambda: given, expected, "torch.distributions, each window alone", observe, **NEAR)


def worked_case() -> Case:
    """A table that gives the byte 1 after 0 the probability 1/4, and after 1 the byte 0 for certain."""
    rows = torch.full((256, 256), -1e4, dtype=torch.float64)
    rows[0, :4], rows[1, 0] = 0.0, 0.0
    text = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.uint8)
    observe = lambda adapters, **_: {"bits per byte": float(adapters.evaluate(Table(rows.clone()), text, 2, 2))}  # noqa: E731
    given = {"text": text, "probability of 1 after 0": 0.25, "of 0 after 1": 1.0, "length": 2, "rows": 2}
    expected = lambda **_: {"bits per byte": 6 / 5}  # noqa: E731
    return Case("worked example", "five predictions of 2, 0, 2, 0 and 2 bits", lambda: given, expected, "arithmetic", observe, **NEAR)


def calls_case(title: str, size: int, length: int, rows: int) -> Case:
    """The budget of calls, sizes of each, and that no logits are kept."""
    text, most = text_of(size, 3), math.ceil(math.ceil((size - 1) / length) / rows) + 1

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Averages)
        adapters.evaluate(model, text.clone(), length, rows)
        shapes = [call.ids.shape for call in model.calls]
        return {
            "calls": budget(len(shapes), most, "calls"),
            "rows of a call": budget(max(shape[0] for shape in shapes), rows, "rows"),
            "columns of a call": budget(max(shape[1] for shape in shapes), length, "columns"),
            "logits held at a call": max(call.alive for call in model.calls),
        }

    expected = {"calls": WITHIN, "rows of a call": WITHIN, "columns of a call": WITHIN, "logits held at a call": 0}
    given = {"bytes": size, "length": length, "rows": rows}
    return Case("budget", title, lambda: given, lambda **_: expected, SAYS, observe)


def memory_case() -> Case:
    """Two texts of which one is four times as long: the peak is the same, but for the text as 64-bit ids."""
    name = "bytes that four times the text adds to the peak"

    def peak(adapters: Any, size: int) -> int:
        model, text = made(lambda: Table(randn(256, 256))), text_of(size, 1)
        with Watch() as watch:
            adapters.evaluate(model, text, 16, 4)
        return watch.most - sum(call.ids.nbytes for call in model.calls)

    def observe(adapters: Any, **_: Any) -> Results:
        return {name: budget(peak(adapters, 4 * 2000) - peak(adapters, 2000), 24 * 6000, "bytes")}

    given = {"bytes": [2000, 8000], "length": 16, "rows": 4, "bytes of the logits of a byte": 2048}
    return Case("budget", "memory for a few windows", lambda: given, lambda **_: {name: WITHIN}, SAYS, observe)


def as_found_case(title: str, recording: bool, fails: int | None = None, training: bool = True) -> Case:
    """Modes, weights, gradients, and whether gradients are recorded. fails: the model raises at its second call."""

    def prepared() -> Recorded:
        model = made(lambda: Averages(dropout=0.5, fails=fails)).train(training)
        model.head.train(not training)
        model.bend.weight.grad = torch.ones_like(model.bend.weight)
        return model

    def state(model: Recorded) -> Results:
        requires = {f"{name} requires a gradient": weight.requires_grad for name, weight in model.named_parameters()}
        return modes_of(model) | gradients_of(model) | weights_of(model) | requires

    def observe(adapters: Any, **_: Any) -> Results:
        model, raised = prepared(), "nothing"
        with torch.set_grad_enabled(recording):
            try:
                adapters.evaluate(model, text_of(100), 9, 3)
            except RuntimeError as error:
                raised = str(error)
            after = torch.is_grad_enabled()
        during = {"training mode in its calls": sorted({call.training for call in model.calls})}
        during["gradients recorded in its calls"] = sorted({call.gradients for call in model.calls})
        return state(model) | during | {"gradients are recorded afterwards": after, "raised": raised}

    def expected(**_: Any) -> Results:
        during = {"training mode in its calls": [False], "gradients recorded in its calls": [False]}
        raised = "the model fails" if fails else "nothing"
        return state(prepared()) | during | {"gradients are recorded afterwards": recording, "raised": raised}

    modes = ("training", "evaluation") if training else ("evaluation", "training")
    given = {"model": f"with dropout, in {modes[0]} mode; its head in {modes[1]} mode", "gradients are recorded": recording}
    return Case("property", title, lambda: given, expected, SAYS, observe, **NEAR)


EVALUATE = (
    worked_case(),
    bits_case("one window", 9, 8, 1),
    bits_case("windows that fill the text", 41, 8, 2, seed=1),
    bits_case("a last window that is shorter", 44, 8, 2, seed=2),
    bits_case("a last window of one byte", 34, 8, 3, seed=3),
    bits_case("one batch is enough", 30, 7, 50, seed=4),
    bits_case("a text shorter than a window", 5, 64, 4, seed=5),
    bits_case("two bytes", 2, 1, 1, seed=6),
    bits_case("windows of one byte", 20, 1, 6, seed=7),
    as_found_case("the model is left as it was found", True),
    as_found_case("also where it was in evaluation mode", True, training=False),
    as_found_case("also where no gradients are recorded", False),
    as_found_case("also where the model raises", True, fails=1),
    calls_case("calls, and their sizes", 400, 8, 5),
    calls_case("calls for a short text", 50, 16, 8),
    memory_case(),
)
