"""Stage 5 of build 05: both rules in one optimizer, decay and learning rate by group, schedules, tied and missing gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .pieces import (
    NEAR,
    ROLES,
    SHAPES,
    TEXT,
    TORCH,
    Named,
    Oracle,
    Results,
    Script,
    drive,
    give,
    made,
    parameters,
    script,
    settings_of,
    steps_case,
    weights_of,
)

# Stage 5: groups

MISSING = {0: ("tokens", "gate"), 1: ("tokens", "mlp", "shift"), 3: ("scale", "down"), 4: tuple(SHAPES)}


def missing(named: Named) -> Script:
    """tokens has its first gradient at step 3, mlp none at step 2, and at step 5 nobody has any."""
    return script(named, 7, without=MISSING)


def never(named: Named) -> Script:
    return script(named, 4, without={step: ("tokens", "gate", "out") for step in range(4)})


def warm_up(step: int) -> float:
    return (step + 1) / 4 if step < 4 else 0.5


def falling(step: int) -> float:
    return 0.9**step


def schedule_case(title: str, factors: dict[str, Callable[[int], float]]) -> Case:
    """LambdaLR with a function for each rule. The oracle's learning rates are set by hand."""

    def expected(**_: Any) -> Results:
        named = parameters(SHAPES)
        oracle, number = Oracle(named, ROLES, settings_of()), [0]

        def step() -> None:
            for rule, optimizer in zip(("adamw", "muon"), oracle.optimizers, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = settings_of()[rule]["lr"] * factors[rule](number[0])
            oracle.step()
            number[0] += 1

        return drive(step, named, script(named, 6))

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        optimizer = made(adapters, named, ROLES, settings_of())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [factors[group["rule"]] for group in optimizer.param_groups])

        def step() -> None:
            optimizer.step()
            scheduler.step()

        return drive(step, named, script(named, 6))

    given = {"LambdaLR": {rule: factor.__name__ for rule, factor in factors.items()}, "steps": 6, **settings_of()}
    return Case("oracle", title, lambda: given, expected, TORCH, observe, **NEAR)


def decay_now_case() -> Case:
    """weight_decay of the decaying groups is set to another value between two steps."""

    def expected(**_: Any) -> Results:
        named = parameters(SHAPES)
        oracle = Oracle(named, ROLES, settings_of())
        return drive(changing(oracle.step, [group for each in oracle.optimizers for group in each.param_groups]), named, script(named, 4))

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        optimizer = made(adapters, named, ROLES, settings_of())
        return drive(changing(optimizer.step, optimizer.param_groups), named, script(named, 4))

    def changing(step: Callable[[], Any], groups: list[Results]) -> Callable[[], None]:
        def act() -> None:
            step()
            for group in groups:
                group["weight_decay"] *= 2.0

        return act

    given = {"weight_decay": "doubled after each step", **settings_of()}
    return Case("oracle", "a decay that changes", lambda: given, expected, TORCH, observe, **NEAR)


def tied_case(title: str, names: dict[str, str], roles: dict[str, str], first: bool) -> Case:
    """names: further names of parameters."""

    def pairs(named: Named) -> list[tuple[str, nn.Parameter]]:
        further = [(name, named[other]) for name, other in names.items()]
        return further + list(named.items()) if first else list(named.items()) + further

    def expected(**_: Any) -> Results:
        named = parameters(SHAPES)
        own = ROLES | {other: "head" for name, other in names.items() if roles[name] == "head"}
        return drive(Oracle(named, own, settings_of()).step, named, script(named, 4))

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        optimizer = adapters.make(iter(pairs(named)), ROLES | roles, settings_of())
        held = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
        return {"held once": len(held) == len(set(held))} | drive(optimizer.step, named, script(named, 4))

    return Case(
        "oracle",
        title,
        lambda: {"further names": names, "their roles": roles},
        lambda **_: {"held once": True} | expected(),
        TORCH,
        observe,
        **NEAR,
    )


def frozen_case() -> Case:
    """Frozen parameters are in no group, even if somebody has left a gradient in them."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        for name in ("gate", "tokens"):
            named[name].requires_grad_(False)
        before = weights_of(named)
        optimizer = made(adapters, named, ROLES, settings_of())
        held = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
        drive(optimizer.step, named, script(named, 2))
        return {name: {"held": id(named[name]) in held, "moved": not torch.equal(named[name], before[name])} for name in named}

    free = {name: name not in ("gate", "tokens") for name in SHAPES}
    expected = lambda **_: {name: {"held": each, "moved": each} for name, each in free.items()}  # noqa: E731
    return Case("property", "frozen parameters", lambda: {"frozen": ["gate", "tokens"]}, expected, TEXT.format(5), observe)


def two_optimizers_case() -> Case:
    """Two optimizers of two models, in turn: neither knows of the other."""

    def run(make: Callable[[Named], Callable[[], Any]]) -> Results:
        models = [parameters(SHAPES, seed=seed) for seed in (1, 5)]
        steps = [make(named) for named in models]
        gradients = [script(models[0], 3, seed=0), script(models[1], 3, seed=500)]
        found: Results = {}
        for number in range(3):
            for which in range(2):
                give(models[which], gradients[which][number])
                steps[which]()
        for which in range(2):
            found |= weights_of(models[which], f" of model {which}")
        return found

    expected = lambda **_: run(lambda named: Oracle(named, ROLES, settings_of()).step)  # noqa: E731
    observe = lambda adapters, **_: run(lambda named: made(adapters, named, ROLES, settings_of()).step)  # noqa: E731
    return Case("oracle", "two optimizers", lambda: {"models": 2, "steps": 3}, expected, TORCH, observe, **NEAR)


def first_group_missing(named: Named) -> Script:
    """Nobody of one rule and one decay has a gradient, in turn."""
    return script(named, 4, without={0: ("tokens", "out"), 1: ("gate", "down", "mlp"), 2: ("scale", "shift")})


GROUPS = (
    steps_case("all roles", SHAPES),
    steps_case(
        "other settings", SHAPES, settings_of({"lr": 0.003, "weight_decay": 0.0}, {"weight_decay": 1.0, "adjust_lr_fn": "match_rms_adamw"})
    ),
    steps_case("no decay for Muon", SHAPES, settings_of({"weight_decay": 0.7}, {"weight_decay": 0.0})),
    frozen_case(),
    steps_case("gradients that are missing", SHAPES, gradients=missing, steps=7),
    steps_case("groups without a gradient", SHAPES, gradients=first_group_missing, steps=4),
    steps_case("parameters that never have a gradient", SHAPES, gradients=never, steps=4),
    tied_case("a head that is tied to the embedding", {"logits": "tokens"}, {"logits": "head"}, first=False),
    tied_case("a tied head that is named first", {"logits": "tokens"}, {"logits": "head"}, first=True),
    tied_case("a matrix that two layers share", {"again": "gate"}, {"again": "matrix"}, first=False),
    tied_case("a matrix that is also the head", {"logits": "gate"}, {"logits": "head"}, first=False),
    schedule_case("a warm-up for both", {"adamw": warm_up, "muon": warm_up}),
    schedule_case("a schedule of its own for each rule", {"adamw": warm_up, "muon": falling}),
    decay_now_case(),
    two_optimizers_case(),
)
