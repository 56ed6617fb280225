"""Stage 11 of build 11: runs that are saved and continued, bit for bit."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .pieces import TEXT, WIDTH, Attention, Recorded, Results, made, settings_of, weights_of
from .running import PAIRS, marked


class Dropping(Attention):
    def __init__(self) -> None:
        super().__init__(dropout=0.25)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def apart(whole: Results, found: Results) -> dict[str, float]:
    """How far weights and losses are from where they should be: sums of distances."""
    distances = {name: (whole[name] - found[name]).abs().sum().item() for name in whole}
    rest = sum(value for name, value in distances.items() if name not in ("head.weight", "losses"))
    found = {"the head": distances["head.weight"], "the losses": distances["losses"], "the rest": rest}
    return {f"how far {name} is off": value for name, value in found.items()}


def resume_case(title: str, before: int, after: int, settings: Results, kind: Callable[[], Recorded], make: Callable = adamw) -> Case:
    """A run that was never interrupted, the same run after it was saved, and one that was continued from the folder."""
    given = {"width": WIDTH, "settings": settings, "batch_size": 3, "micro_size": 2, "seed": 4}

    def begun(adapters: Any) -> tuple[Recorded, Any]:
        torch.manual_seed(31)
        model = made(kind)
        return model, adapters.start(model, make(model), marked(), *given.values())

    def state(model: Recorded, losses: list[float]) -> Results:
        return weights_of(model) | {"losses": torch.tensor([float(loss) for loss in losses], dtype=torch.float64)}

    def observe(adapters: Any, **_: Any) -> Results:
        model, run = begun(adapters)
        adapters.advance(run, before)
        whole = state(model, adapters.advance(run, after))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "runs" / "saved"
            model, run = begun(adapters)
            adapters.advance(run, before)
            adapters.save(run, path)
            continued = state(model, adapters.advance(run, after))
            other = made(kind, seed=77)
            torch.manual_seed(5)
            optimizer = make(other)
            run = adapters.resume(other, optimizer, marked(), *given.values(), path)
            calls = len(other.calls)
            resumed = state(other, adapters.advance(run, after))
        found = {"saved": apart(whole, continued), "resumed": apart(whole, resumed)}
        return found | {"calls of resume": calls}

    def expected(**_: Any) -> Results:
        nothing = {f"how far {name} is off": 0.0 for name in ("the head", "the losses", "the rest")}
        return {"saved": nothing, "resumed": nothing, "calls of resume": 0}

    shown = {"model": kind.__name__, "pairs": PAIRS, "steps before": before, "steps after": after, "batch_size": 3, **settings}
    return Case("property", title, lambda: shown, expected, TEXT.format(11), observe)  # its tolerance is relative, so 0 is 0


def twice_case() -> Case:
    """Saved, resumed, saved again in the same folder, and resumed again."""

    def observe(adapters: Any, **_: Any) -> Results:
        given = {"width": WIDTH, "settings": settings_of(), "batch_size": 3, "micro_size": 2, "seed": 4}
        model = made(Attention)
        run = adapters.start(model, adamw(model), marked(), *given.values())
        adapters.advance(run, 6)
        whole = weights_of(model)
        with tempfile.TemporaryDirectory() as folder:
            model = made(Attention)
            run = adapters.start(model, adamw(model), marked(), *given.values())
            for steps in (1, 3, 2):
                adapters.advance(run, steps)
                adapters.save(run, Path(folder))
                model = made(Attention, seed=steps)
                run = adapters.resume(model, adamw(model), marked(), *given.values(), Path(folder))
        return {"how far the weights are off": sum((weight - whole[name]).abs().sum().item() for name, weight in weights_of(model).items())}

    given = {"pairs": PAIRS, "steps": [1, 3, 2]}
    expected = lambda **_: {"how far the weights are off": 0.0}  # noqa: E731
    return Case("property", "saved three times", lambda: given, expected, TEXT.format(11), observe)


RESUME = (
    resume_case("before the first step", 0, 3, settings_of(), Attention),
    resume_case("in the middle of an epoch", 4, 3, settings_of(), Attention, momentum),
    resume_case("AdamW", 2, 3, settings_of("ipo"), Attention),
    resume_case("a model with dropout", 3, 3, settings_of(), Dropping, momentum),
    resume_case("without a reference", 4, 2, settings_of("simpo", 2.0), Dropping),
    twice_case(),
)
