"""Stage 10 of build 05: what cannot be right is refused, and everything stays as it was."""

import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared.course.checking import Case

from .pieces import (
    ADAMW,
    MUON,
    ROLES,
    SHAPES,
    TEXT,
    Named,
    Results,
    drive,
    give,
    made,
    parameters,
    refused,
    script,
    settings_of,
    weights_of,
)


def refusal(said: tuple[str, ...], act: Callable[[], Any]) -> str:
    """What `act` does, which is to raise a ValueError that says all of `said`."""
    wanted = wanted_of(said)
    try:
        act()
    except ValueError as error:
        return refused(error, said, wanted)
    return "accepted"


def wanted_of(said: tuple[str, ...]) -> str:
    return f"ValueError that says {' and '.join(word.replace('|', ' or ') for word in said)}"


def simple_case(title: str, given: Results, said: tuple[str, ...], act: Callable[[Any], Any]) -> Case:
    observe = lambda adapters, **_: {"result": refusal(said, lambda: act(adapters))}  # noqa: E731
    return Case("property", title, lambda: given, lambda **_: {"result": wanted_of(said)}, TEXT.format(10), observe)


def setting_case(title: str, section: str, key: str, value: Any) -> Case:
    settings = settings_of()
    settings[section][key] = value
    act = lambda adapters: made(adapters, parameters(SHAPES), ROLES, settings)  # noqa: E731
    return simple_case(title, {section: {key: value}}, (key, section), act)


def keys_case(title: str, said: str, edit: Callable[[Results], Any]) -> Case:
    def act(adapters: Any) -> Any:
        settings = settings_of()
        edit(settings)
        return adapters.make(iter(parameters(SHAPES).items()), dict(ROLES), settings)

    return simple_case(title, {"settings": title}, (said,), act)


def parameters_case(title: str, said: str, pairs: Callable[[Named], list[tuple[str, nn.Parameter]]], roles: dict[str, str]) -> Case:
    act = lambda adapters: adapters.make(iter(pairs(parameters(SHAPES))), dict(roles), settings_of())  # noqa: E731
    return simple_case(title, {"roles": roles}, (said,), act)


def right_case(title: str, adamw: Results, muon: Results) -> Case:
    """Values at the edge of what is right."""

    def observe(adapters: Any, **_: Any) -> Results:
        try:
            made(adapters, parameters(SHAPES), ROLES, settings_of(adamw, muon))
        except ValueError as error:
            return {"result": f"ValueError: {error}"}
        return {"result": "accepted"}

    return Case("property", title, lambda: {"adamw": adamw, "muon": muon}, lambda **_: {"result": "accepted"}, TEXT.format(10), observe)


def clip_case(title: str, max_norm: Any) -> Case:
    """And no gradient has changed."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        [gradients] = script(named, 1)
        give(named, gradients)
        optimizer = made(adapters, named, ROLES, settings_of())
        result = refusal(("max_norm",), lambda: adapters.clip(optimizer, max_norm))
        return {"result": result, "gradients": all(torch.equal(named[name].grad, gradients[name]) for name in named)}

    expected = {"result": wanted_of(("max_norm",)), "gradients": True}
    return Case("property", title, lambda: {"max_norm": max_norm}, lambda **_: expected, TEXT.format(10), observe)


def scale_case(title: str, name: str, value: Any) -> Case:
    own = {"start": 8.0, "growth": 2.0, "backoff": 0.5, "interval": 2} | {name: value}
    return simple_case(title, own, (name,), lambda adapters: adapters.loss_scale(*own.values()))


def load_case(title: str, said: str, shapes: dict[str, tuple[int, ...]], roles: dict[str, str] = ROLES) -> Case:
    """A state of other parameters. The optimizer's next step is as if nobody had tried."""

    def run(adapters: Any, bad: bool) -> tuple[str, Results]:
        other = parameters(shapes)
        source = made(adapters, other, roles, settings_of({"lr": 0.5}, {"lr": 0.5}))
        drive(source.step, other, script(other, 3))
        named = parameters(SHAPES)
        optimizer = made(adapters, named, ROLES, settings_of())
        first, second = script(named, 2)
        give(named, first)
        optimizer.step()
        file = io.BytesIO()
        torch.save(adapters.state(source), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        result = refusal((said,), lambda: adapters.load(optimizer, saved)) if bad else ""
        give(named, second)
        optimizer.step()
        return result, weights_of(named)

    def observe(adapters: Any, **_: Any) -> Results:
        result, weights = run(adapters, True)
        _, alone = run(adapters, False)
        return {"result": result, "differs after the next step": [name for name in alone if not torch.equal(alone[name], weights[name])]}

    expected = {"result": wanted_of((said,)), "differs after the next step": []}
    return Case("property", title, lambda: {"saved": shapes}, lambda **_: expected, TEXT.format(10), observe)


def as_listed(named: Named) -> list[tuple[str, nn.Parameter]]:
    return list(named.items())


def twice(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [*named.items(), ("gate", nn.Parameter(torch.zeros(6, 4).double()))]


def frozen(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight.requires_grad_(False)) for name, weight in named.items()]


def complex_one(named: Named) -> list[tuple[str, nn.Parameter]]:
    return [*named.items(), ("waves", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in SHAPES.items() if key != name}


NAN, INF = math.nan, math.inf

BAD_INPUT = (
    setting_case("a negative learning rate", "adamw", "lr", -0.1),
    setting_case("Muon's learning rate is no number", "muon", "lr", NAN),
    setting_case("an infinite learning rate", "adamw", "lr", INF),
    setting_case("a learning rate in words", "muon", "lr", "0.1"),
    setting_case("a learning rate that is True", "adamw", "lr", True),
    setting_case("a negative decay", "muon", "weight_decay", -0.1),
    setting_case("a decay of None", "adamw", "weight_decay", None),
    setting_case("a negative eps", "adamw", "eps", -1e-8),
    setting_case("Muon's eps is infinite", "muon", "eps", INF),
    setting_case("a beta of 1", "adamw", "betas", (0.9, 1.0)),
    setting_case("a negative beta", "adamw", "betas", (-0.1, 0.9)),
    setting_case("a beta that is no number", "adamw", "betas", (NAN, 0.9)),
    setting_case("one beta", "adamw", "betas", (0.9,)),
    setting_case("betas that are one number", "adamw", "betas", 0.9),
    setting_case("a momentum of 1", "muon", "momentum", 1.0),
    setting_case("a momentum that is no number", "muon", "momentum", NAN),
    setting_case("two coefficients", "muon", "ns_coefficients", (1.5, -0.5)),
    setting_case("a coefficient that is infinite", "muon", "ns_coefficients", (1.5, -0.5, INF)),
    setting_case("no iterations", "muon", "ns_steps", 0),
    setting_case("five and a half iterations", "muon", "ns_steps", 5.5),
    setting_case("iterations that are True", "muon", "ns_steps", True),
    setting_case("nesterov is 1", "muon", "nesterov", 1),
    setting_case("a scale that there is not", "muon", "adjust_lr_fn", "match_rms"),
    setting_case("no scale", "muon", "adjust_lr_fn", None),
    keys_case("a section that there is not", "lion", lambda settings: settings.update(lion={})),
    keys_case("a section that is missing", "muon", lambda settings: settings.pop("muon")),
    keys_case("a key that there is not", "amsgrad", lambda settings: settings["adamw"].update(amsgrad=True)),
    keys_case("a key that is missing", "eps", lambda settings: settings["adamw"].pop("eps")),
    keys_case("a key of the other section", "betas", lambda settings: settings["muon"].update(betas=ADAMW["betas"])),
    right_case("zeros", {"lr": 0, "eps": 0, "weight_decay": 0, "betas": (0, 0)}, {"lr": 0, "eps": 0, "momentum": 0, "weight_decay": 0}),
    right_case("lists", {"betas": [0.9, 0.999]}, {"ns_coefficients": list(MUON["ns_coefficients"]), "ns_steps": 1}),
    parameters_case("a parameter without a role", "gate", as_listed, {name: role for name, role in ROLES.items() if name != "gate"}),
    parameters_case("a role that there is not", "shift", as_listed, ROLES | {"shift": "biases"}),
    parameters_case("a further name without a role", "logits", lambda named: [*named.items(), ("logits", named["tokens"])], ROLES),
    parameters_case("a name of two parameters", "gate", twice, ROLES),
    parameters_case("nothing to train", "parameter", frozen, ROLES),
    parameters_case("no parameters", "parameter", lambda named: [], ROLES),
    parameters_case("complex numbers", "waves", complex_one, ROLES | {"waves": "matrix"}),
    clip_case("a max_norm of 0", 0.0),
    clip_case("a negative max_norm", -1.0),
    clip_case("a max_norm that is no number", NAN),
    clip_case("a max_norm of None", None),
    scale_case("a scale that begins at 0", "start", 0.0),
    scale_case("an infinite scale", "start", INF),
    scale_case("growth of 1", "growth", 1.0),
    scale_case("backoff of 1", "backoff", 1.0),
    scale_case("backoff of 0", "backoff", 0.0),
    scale_case("an interval of 0", "interval", 0),
    scale_case("an interval of 1.5", "interval", 1.5),
    load_case("a state that lacks a parameter", "down", without("down")),
    load_case("a state with a parameter too many", "new", SHAPES | {"new": (4, 4)}, ROLES | {"new": "matrix"}),
    load_case("a state with another shape", "mlp", SHAPES | {"mlp": (3, 4, 5)}),
    load_case("a state with as many numbers in another shape", "gate", SHAPES | {"gate": (4, 6)}),
    load_case("a state with another rule", "down", SHAPES, ROLES | {"down": "norm"}),
)
