"""Stage 7 of build 05: the state by name, through torch.save, into a fresh optimizer with its parameters in another order."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .pieces import (
    EXACT,
    ROLES,
    SHAPES,
    TEXT,
    Named,
    Results,
    drive,
    give,
    parameters,
    script,
    settings_of,
    weights_of,
)

Pairs = list[tuple[str, nn.Parameter]]


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def as_listed(named: Named) -> Pairs:
    return list(named.items())


def backwards(named: Named) -> Pairs:
    return list(named.items())[::-1]


def by_name(named: Named) -> Pairs:
    return sorted(named.items())


def with_head_last(named: Named) -> Pairs:
    return [*named.items(), ("logits", named["tokens"])]


def with_head_first(named: Named) -> Pairs:
    return [("logits", named["tokens"]), *list(named.items())[::-1]]


def optimizer_of(adapters: Any, pairs: Pairs, settings: Results | None = None) -> Any:
    return adapters.make(iter(pairs), ROLES | {"logits": "head"}, settings or settings_of())


def resume_case(
    title: str,
    before: Callable[[Named], Pairs],
    after: Callable[[Named], Pairs],
    dtype: torch.dtype = torch.float64,
    without: dict[int, tuple[str, ...]] | None = None,
    settings: Results | None = None,
    done: int = 3,
) -> Case:
    """`done` steps, a saved state, a fresh optimizer over a copy of the model, more steps: bit for bit as without an interruption.

    The uninterrupted run is the answer's own: stages 2 to 5 say that it is right. settings: of the fresh optimizer.
    """

    def observe(adapters: Any, **_: Any) -> Results:
        whole = parameters(SHAPES, dtype)
        gradients = script(whole, 6, without=without)
        optimizer = optimizer_of(adapters, before(whole))
        drive(optimizer.step, whole, gradients[:done])
        saved = through_a_file(adapters.state(optimizer))
        copy = {name: nn.Parameter(weight.detach().clone()) for name, weight in whole.items()}
        rest = drive(optimizer.step, whole, gradients[done:])
        fresh = optimizer_of(adapters, after(copy), settings)
        adapters.load(fresh, saved)
        resumed = drive(fresh.step, copy, gradients[done:])
        return {name: describe(rest[name], resumed[name]) for name in rest}

    def expected(**_: Any) -> Results:
        return {f"{name} after step {number}": "as without an interruption" for number in range(1, 7 - done) for name in SHAPES}

    given = {"saved with": before.__name__, "loaded with": after.__name__, "dtype": str(dtype), "steps before": done}
    return Case("property", title, lambda: given, expected, TEXT.format(7), observe, **EXACT)


def describe(one: torch.Tensor, other: torch.Tensor) -> str:
    same = torch.equal(one, other)
    return "as without an interruption" if same else f"differs by {(one.double() - other.double()).abs().max():.1e}"


def schedule_case() -> Case:
    """LambdaLR, saved in the middle. The fresh optimizer is made with other learning rates: those that were saved count."""

    def observe(adapters: Any, **_: Any) -> Results:
        whole = parameters(SHAPES)
        gradients = script(whole, 6)
        optimizer = optimizer_of(adapters, as_listed(whole))
        scheduler = scheduled(optimizer)
        drive(both(optimizer, scheduler), whole, gradients[:3])
        saved, progress = through_a_file(adapters.state(optimizer)), scheduler.state_dict()
        copy = {name: nn.Parameter(weight.detach().clone()) for name, weight in whole.items()}
        rest = drive(both(optimizer, scheduler), whole, gradients[3:])
        fresh = optimizer_of(adapters, backwards(copy), settings_of({"lr": 0.5, "weight_decay": 0.9}, {"lr": 0.25, "momentum": 0.1}))
        again = scheduled(fresh)
        adapters.load(fresh, saved)
        again.load_state_dict(progress | {"base_lrs": [group["initial_lr"] for group in fresh.param_groups]})
        resumed = drive(both(fresh, again), copy, gradients[3:])
        return {name: describe(rest[name], resumed[name]) for name in rest}

    expected = lambda **_: {f"{name} after step {n}": "as without an interruption" for n in (1, 2, 3) for name in SHAPES}  # noqa: E731
    return Case("property", "a schedule, and other settings", lambda: {"LambdaLR": "0.8^step"}, expected, TEXT.format(7), observe, **EXACT)


def scheduled(optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def both(optimizer: Any, scheduler: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        scheduler.step()

    return step


def loaded_twice_case() -> Case:
    """One saved state for two optimizers: the steps of the first do not change it, and neither do those of the one that was saved."""

    def observe(adapters: Any, **_: Any) -> Results:
        whole = parameters(SHAPES)
        gradients = script(whole, 5)
        optimizer = optimizer_of(adapters, as_listed(whole))
        drive(optimizer.step, whole, gradients[:2])
        saved = adapters.state(optimizer)
        copies = [{name: nn.Parameter(weight.detach().clone()) for name, weight in whole.items()} for _ in range(3)]
        kept = through_a_file(saved)
        found = []
        for copy, source in zip(copies, (kept, kept, saved), strict=True):
            fresh = optimizer_of(adapters, by_name(copy))
            adapters.load(fresh, source)
            found.append(drive(fresh.step, copy, gradients[2:]))
        return {name: describe(found[0][name], found[1][name]) for name in found[0]}

    expected = lambda **_: {f"{name} after step {n}": "as without an interruption" for n in (1, 2, 3) for name in SHAPES}  # noqa: E731
    return Case("property", "one state, loaded twice", lambda: {"steps": 3}, expected, TEXT.format(7), observe, **EXACT)


def quiet_case() -> Case:
    """To save moves nothing, and to load moves no weight and no gradient."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        gradients = script(named, 2)
        optimizer = optimizer_of(adapters, as_listed(named))
        give(named, gradients[0])
        optimizer.step()
        before = weights_of(named)
        saved = through_a_file(adapters.state(optimizer))
        adapters.load(optimizer, saved)
        kept = all(torch.equal(named[name], before[name]) for name in named)
        return {"weights": kept, "gradients": all(torch.equal(named[name].grad, gradients[0][name]) for name in named)}

    return Case(
        "property",
        "weights stay",
        lambda: {"parameters": list(SHAPES)},
        lambda **_: {"weights": True, "gradients": True},
        TEXT.format(7),
        observe,
        **EXACT,
    )


FIRST = ("tokens", "gate", "shift")

RESUME = (
    resume_case("the same order", as_listed, as_listed),
    resume_case("the order turned round", as_listed, backwards),
    resume_case("by the alphabet", backwards, by_name),
    resume_case("a parameter without a step so far", as_listed, backwards, without={step: FIRST for step in range(3)}),
    resume_case("parameters with fewer steps", as_listed, by_name, without={0: FIRST, 4: ("scale",)}),
    resume_case("a tied head", with_head_last, with_head_last),
    resume_case("a tied head whose names change places", with_head_last, with_head_first),
    resume_case("and the other way", with_head_first, with_head_last),
    resume_case("before the first step", as_listed, backwards, done=0),
    resume_case(
        "other settings are replaced",
        as_listed,
        by_name,
        settings=settings_of({"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.1}, {"lr": 0.3, "nesterov": False, "ns_steps": 2}),
    ),
    resume_case("weights of bfloat16", as_listed, backwards, dtype=torch.bfloat16),
    resume_case("weights of float16", by_name, as_listed, dtype=torch.float16),
    schedule_case(),
    loaded_twice_case(),
    quiet_case(),
)
