"""Stages 7 and 8 of build 01: runs of the learner's own recipe, which are watched, saved and continued."""

import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.checking import Case

from .pieces import TEXT, WITHIN, Results, budget, text_of
from .table import table_case

SIZE = 100_000
STEPS = 4


def run_case(title: str, expected: Results, look: Callable[[Any], Results], stage: int = 7, given: Results | None = None) -> Case:
    given = given or {"bytes of the text": SIZE, "seed": 3}
    return Case("property", title, lambda: given, lambda **_: expected, TEXT.format(stage), lambda adapters, **_: look(adapters))


def numbers(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten().double() for weight in model.parameters()])


class Noted:
    """The ids and logits of each call of a model, while it is looked at."""

    def __init__(self, model: nn.Module):
        self.model, self.ids, self.logits, self.modes = model, [], [], []

    def __enter__(self) -> "Noted":
        self.hook = self.model.register_forward_hook(self.note)
        return self

    def note(self, model: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> None:
        self.ids.append(given[0].detach().clone())
        self.logits.append(logits.detach().clone())
        self.modes.append(model.training)

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def alike(adapters: Any) -> Results:
    """The same seed, another one, and whatever was drawn before and in between."""

    def losses(seed: int, other: int) -> list[float]:
        torch.manual_seed(other)
        run = adapters.start(text_of(SIZE), seed)
        first = adapters.advance(run, 2)
        torch.manual_seed(other + 1)
        return [*first, *adapters.advance(run, STEPS - 2)]

    first = losses(3, 10)
    found = {"losses": len(first), "kinds": sorted({type(value).__name__ for value in first})}
    return found | {"the same seed again": first == losses(3, 20), "another seed": first == losses(4, 10)}


ALIKE = {"losses": STEPS, "kinds": ["float"], "the same seed again": True, "another seed": False}


def pieces(adapters: Any) -> Results:
    """Advanced in pieces or at once; two runs in turns; no step at all."""
    whole, first, second = (adapters.start(text_of(SIZE), seed) for seed in (3, 3, 5))
    losses = adapters.advance(whole, STEPS)
    found = []
    for _ in range(STEPS):
        found += adapters.advance(first, 1)
        adapters.advance(second, 1)
    equal = bool(torch.equal(numbers(adapters.model_of(whole)), numbers(adapters.model_of(first))))
    none = adapters.advance(whole, 0)
    return {"losses one step at a time are the same": found == losses, "so are the parameters": equal, "0 steps": none}


PIECES = {"losses one step at a time are the same": True, "so are the parameters": True, "0 steps": []}


def model_is_new(adapters: Any) -> Results:
    run, fresh = adapters.start(text_of(SIZE), 6), adapters.new_model(6)
    model = adapters.model_of(run)
    found = {"before the first step": bool(torch.equal(numbers(model), numbers(fresh)))}
    adapters.advance(run, STEPS)
    still = [name for name, weight in model.named_parameters() if weight.requires_grad and torch.equal(weight, fresh.state_dict()[name])]
    return found | {"the model is the run's": adapters.model_of(run) is model, "parameters that did not move": still}


MODEL_IS_NEW = {"before the first step": True, "the model is the run's": True, "parameters that did not move": []}


@cache
def places_by_five() -> dict[tuple[int, ...], int]:
    """Where in the text each run of five bytes is: they are random, so no two places look alike."""
    return {tuple(five): place for place, five in enumerate(text_of(SIZE, seed=2).long().unfold(0, 5, 1).tolist())}


def data(adapters: Any) -> Results:
    """What the model was shown: runs of the text, from all of it, others in each step. Five bytes say where in this text they are."""
    text = text_of(SIZE, seed=2)
    places = places_by_five()
    run = adapters.start(text, 1)
    with Noted(adapters.model_of(run)) as noted:
        adapters.advance(run, STEPS)
    starts, strange = [], 0
    for ids in noted.ids:
        found = [places.get(tuple(row[:5].tolist()), 0) for row in ids]
        strange += sum(not torch.equal(row, text[place : place + len(row)].long()) for row, place in zip(ids, found, strict=True))
        starts.append(found)
    flat = [place for found in starts for place in found]
    return {
        "the model was called": bool(noted.ids),
        "columns": budget(max((ids.shape[1] for ids in noted.ids), default=0), 256, "columns"),
        "rows that are no run of the text": strange,
        "calls with the windows of an earlier one": len(starts) - len({tuple(found) for found in starts}),
        "some windows begin in the first half": any(place < SIZE / 2 for place in flat),
        "some windows begin in the second half": any(place >= SIZE / 2 for place in flat),
        "training mode": all(noted.modes),
    }


DATA = {
    "the model was called": True,
    "columns": WITHIN,
    "rows that are no run of the text": 0,
    "calls with the windows of an earlier one": 0,
    "some windows begin in the first half": True,
    "some windows begin in the second half": True,
    "training mode": True,
}


def losses(adapters: Any) -> Results:
    """Each step's loss is that of the logits that the model gave in the step, for the bytes that follow in the text."""
    text = text_of(SIZE, seed=2)
    places = places_by_five()
    run, wrong = adapters.start(text, 2), []
    for _ in range(STEPS):
        with Noted(adapters.model_of(run)) as noted:
            [reported] = adapters.advance(run, 1)
        nats = []
        for ids, logits in zip(noted.ids, noted.logits, strict=True):
            for row, scores in zip(ids, logits, strict=True):
                place = places.get(tuple(row[:5].tolist()), 0)
                targets = text[place + 1 : place + 1 + len(row)].long()
                nats.append(F.cross_entropy(scores[: len(targets)].double(), targets, reduction="none"))
        mean = torch.cat(nats).mean().item() if nats else math.nan
        if not math.isclose(mean, reported, rel_tol=1e-3):
            wrong.append(f"{reported:.3f}, and the model's logits say {mean:.3f}")
    return {"losses that are not the mean in nats": wrong}


TRAIN = (
    run_case("the same from the same seed", ALIKE, alike),
    run_case("in pieces, and two runs in turns", PIECES, pieces),
    run_case("a new model, all of which is trained", MODEL_IS_NEW, model_is_new),
    run_case("what the model is shown", DATA, data),
    run_case("the losses", {"losses that are not the mean in nats": []}, losses),
    table_case(),
)


# Stage 8: resume


def resumed(adapters: Any, before: int) -> Results:
    """A run that was saved, and the same run continued: parameters, windows and losses of three more steps."""
    text = text_of(SIZE, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a_run"
        run = adapters.start(text, 7)
        adapters.advance(run, before)
        adapters.save(run, path)
        at_first = numbers(adapters.model_of(run))
        expected = three_more(adapters, run)
        torch.manual_seed(99)
        again = adapters.resume(text.clone(), path)
        restored = numbers(adapters.model_of(again))
        found = three_more(adapters, again)
    near = "nearly the same" if torch.allclose(at_first, restored, 1e-2, 1e-3) else "others"
    return {
        "parameters when it continues": "the same" if torch.equal(at_first, restored) else near,
        "windows are the same": [one[0] == other[0] for one, other in zip(expected, found, strict=True)],
        "steps with windows of their own": len({str(one[0]) for one in found}),
        "losses are the same": [one[1] == other[1] for one, other in zip(expected, found, strict=True)],
        "parameters at the end are the same": bool(torch.equal(*(numbers(adapters.model_of(each)) for each in (run, again)))),
    }


def three_more(adapters: Any, run: object) -> list[tuple[Any, float]]:
    """The windows and the loss of each of three steps. Gradients of a step before are cleared, as a step has to do."""
    found = []
    adapters.model_of(run).zero_grad()
    for _ in range(3):
        with Noted(adapters.model_of(run)) as noted:
            [loss] = adapters.advance(run, 1)
        found.append(([ids.tolist() for ids in noted.ids], loss))
    return found


RESUMED = {
    "parameters when it continues": "the same",
    "windows are the same": [True] * 3,
    "steps with windows of their own": 3,
    "losses are the same": [True] * 3,
    "parameters at the end are the same": True,
}


def twice(adapters: Any) -> Results:
    """Saved, continued, saved again in the same file, continued again."""
    text = text_of(SIZE, seed=1)
    whole = adapters.start(text, 8)
    expected = adapters.advance(whole, 3)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a_run"
        run = adapters.start(text, 8)
        for _ in range(3):
            found += adapters.advance(run, 1)
            adapters.save(run, path)
            run = adapters.resume(text, path)
    return {"losses of a run that was saved after each step": [one == other for one, other in zip(found, expected, strict=True)]}


def untouched(adapters: Any) -> Results:
    """A save changes nothing in the run, and a run that goes on changes nothing in the file."""
    text = text_of(SIZE, seed=1)
    alone, run = adapters.start(text, 9), adapters.start(text, 9)
    expected = adapters.advance(alone, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a_run"
        found = adapters.advance(run, 1)
        adapters.save(run, path)
        content = path.read_bytes() if path.is_file() else b""
        found += adapters.advance(run, 2)
        same = path.is_file() and path.read_bytes() == content
        others = sorted(each.name for each in Path(folder).iterdir() if each != path)
        size = sum(weight.nbytes for weight in [*adapters.model_of(run).parameters(), *adapters.model_of(run).buffers()])
        held = budget(len(content), 4 * size + 100_000, "bytes")
    alike = [one == other for one, other in zip(found, expected, strict=True)]
    return {"losses of a run that goes on": alike, "the file stays": same, "other files": others, "bytes of the file": held}


UNTOUCHED = {"losses of a run that goes on": [True] * 3, "the file stays": True, "other files": [], "bytes of the file": WITHIN}

RESUME = (
    run_case("a run that goes on", UNTOUCHED, untouched, 8),
    run_case("before the first step", RESUMED, lambda adapters: resumed(adapters, 0), 8),
    run_case("after three steps", RESUMED, lambda adapters: resumed(adapters, 3), 8),
    run_case("after each step", {"losses of a run that was saved after each step": [True] * 3}, twice, 8),
)
