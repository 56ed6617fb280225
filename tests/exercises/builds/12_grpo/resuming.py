"""Stage 12 of build 12: runs that are saved, also in the middle of a rollout, and continued bit for bit."""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import Attention, Recorded, Results, case, made, settings_of, weights_of
from .running import SEVEN, noting


def adamw(model: Recorded) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def momentum(model: Recorded) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def after(adapters: Any, run: object, model: Recorded, steps: int) -> Results:
    """What the next steps leave: weights and metrics as they are, bit for bit, and the answers that they drew."""
    del model.journal[:]
    found = [{name: float(value) for name, value in each.items()} for each in adapters.advance(run, steps)]
    answers = [noted for noted in model.journal if isinstance(noted, tuple)]
    return {"weights": {name: weight.tolist() for name, weight in weights_of(model).items()}, "metrics": found, "answers": answers}


def apart(whole: Results, found: Results) -> Results:
    """How far weights and metrics are from where they should be: sums of distances. And how many answers are others."""
    weights = sum((torch.tensor(each) - torch.tensor(found["weights"][name])).abs().sum().item() for name, each in whole["weights"].items())
    pairs = zip(whole["metrics"], found["metrics"], strict=True)
    metrics = sum(abs(a[name] - b[name]) for a, b in pairs for name in ("loss", "reward", "flat"))
    others = abs(len(whole["answers"]) - len(found["answers"]))
    others += sum(a != b for a, b in zip(whole["answers"], found["answers"], strict=False))
    return {"how far weights are off": float(weights), "how far metrics are off": float(metrics), "other answers": others}


def resume_case(title: str, before: list[int], steps: int, make: Callable = adamw, **changes: Any) -> Case:
    """A run that was never interrupted; the same run after it was saved; one that was continued from the folder, after each of `before`."""
    settings = settings_of(**{"prompts": 3, "updates": 3} | changes)

    def begun(adapters: Any) -> tuple[Recorded, object]:
        model = made(Attention)
        return model, adapters.start(model, make(model), SEVEN, noting(model), dict(settings), 4)

    def observe(adapters: Any) -> Results:
        model, run = begun(adapters)
        adapters.advance(run, sum(before))
        whole, calls = after(adapters, run, model, steps), 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "runs" / "saved"
            model, run = begun(adapters)
            for number, each in enumerate(before):
                adapters.advance(run, each)
                adapters.save(run, path)
                saved = model, run
                model = made(Attention, seed=70 + number)
                torch.manual_seed(number)
                random.seed(number)
                run = adapters.resume(model, make(model), SEVEN, noting(model), dict(settings), 4, path)
                calls += len(model.journal)
            found = {"saved": after(adapters, saved[1], saved[0], steps), "resumed": after(adapters, run, model, steps)}
        return {name: apart(whole, each) for name, each in found.items()} | {"calls of the model and the reward by resume": calls}

    def expected() -> Results:
        nothing = {"how far weights are off": 0.0, "how far metrics are off": 0.0, "other answers": 0}
        return {"saved": nothing, "resumed": nothing, "calls of the model and the reward by resume": 0}

    given = {"prompts": SEVEN, "steps before each save": before, "steps after": steps, **settings}
    return case(title, given, expected, observe, 12, rung="property", rtol=0.0, atol=0.0)


RESUME = (
    resume_case("before the first step", [0], 4),
    resume_case("between two rollouts", [3], 4, momentum),
    resume_case("in the middle of a rollout", [4], 4, momentum),
    resume_case("AdamW, in the middle of a rollout", [2], 5),
    resume_case("at the end of an epoch", [7], 4, updates=1, prompts=1, group=2),
    resume_case("saved three times", [1, 2, 2], 3),
)
