"""Stage 8 of build 05: weights of 16 bits with float32 copies, and a loss scale, against torch.amp.GradScaler over float32 copies."""

import math
from collections.abc import Callable
from typing import Any

import torch

from shared.course.checking import Case

from .pieces import (
    ROLES,
    SHAPES,
    TEXT,
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
    weights_of,
)

SCALER = "torch.amp.GradScaler and clip_grad_norm_ over float32 copies"
ROUNDED = {"rtol": 0.016, "atol": 2e-3}  # two roundings of bfloat16


def small_steps_case(title: str, dtype: torch.dtype, lr: float, **tolerance: Any) -> Case:
    """Movements below half of a weight's last bit: without a copy nothing moves, with one they add up."""
    settings = settings_of({"lr": lr, "weight_decay": 0.0}, {"lr": 2 * lr, "weight_decay": 0.0})

    def run(make: Callable[[Named], Any]) -> Results:
        named = parameters(SHAPES, dtype)
        with torch.no_grad():
            for weight in named.values():
                weight.copy_(1.0 + weight.abs())
        gradients = script(named, 1) * 40
        return drive(make(named).step, named, gradients, 40)

    expected = lambda **_: run(lambda named: Oracle(named, ROLES, settings))  # noqa: E731
    observe = lambda adapters, **_: run(lambda named: made(adapters, named, ROLES, settings))  # noqa: E731
    given = {"weights": "1 and more", "gradients": "the same 40 times", "dtype": str(dtype), **settings}
    return Case("oracle", title, lambda: given, expected, "torch.optim's optimizers over float32 copies", observe, **tolerance)


def mixed_dtypes_case() -> Case:
    """float32 norms beside bfloat16 matrices."""

    def run(make: Callable[[Named], Any]) -> Results:
        halves = parameters(SHAPES, torch.bfloat16)
        named = {
            name: torch.nn.Parameter(weight.detach().float()) if name in ("scale", "gate", "out") else weight
            for name, weight in halves.items()
        }
        return drive(make(named).step, named, script(named, 4), 4)

    expected = lambda **_: run(lambda named: Oracle(named, ROLES, settings_of()))  # noqa: E731
    observe = lambda adapters, **_: run(lambda named: made(adapters, named, ROLES, settings_of()))  # noqa: E731
    return Case(
        "oracle",
        "both dtypes in one model",
        lambda: {"float32": ["scale", "gate", "out"]},
        expected,
        "torch.optim's optimizers over float32 copies",
        observe,
        **ROUNDED,
    )


def dtypes_case(dtype: torch.dtype) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES, dtype)
        storages = {name: weight.data_ptr() for name, weight in named.items()}
        optimizer = made(adapters, named, ROLES, settings_of())
        drive(optimizer.step, named, script(named, 2))
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        return {
            "dtypes": sorted({str(weight.dtype) for weight in named.values()}),
            "groups hold the model's parameters": held == {id(weight) for weight in named.values()},
            "where they were": all(weight.data_ptr() == storages[name] for name, weight in named.items()),
        }

    expected = lambda **_: {"dtypes": [str(dtype)], "groups hold the model's parameters": True, "where they were": True}  # noqa: E731
    return Case(
        "property", f"weights stay in {str(dtype).removeprefix('torch.')}", lambda: {"dtype": str(dtype)}, expected, TEXT.format(8), observe
    )


# Loss scale


def poisoned(bad: dict[int, tuple[str, float]]) -> Callable[[Named, int], Script]:
    """Steps with one number that is not finite: step -> parameter and number."""

    def gradients(named: Named, steps: int) -> Script:
        found = script(named, steps)
        for step, (name, value) in bad.items():
            found[step][name].view(-1)[-1] = value
        return found

    return gradients


def script_case(
    title: str,
    bad: dict[int, tuple[str, float]],
    steps: int = 7,
    start: float = 8.0,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2,
    max_norm: float = 1.0,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    missing: dict[int, tuple[str, ...]] | None = None,
    eps: float = 1e-6,
    **tolerance: Any,
) -> Case:
    """Gradients are multiplied by the scale, as a loss would have it, and given to `update`."""
    settings = settings_of({"eps": eps}, {"eps": eps})

    def scaled(named: Named, number: int, scale: float) -> None:
        gradients = poisoned(bad)(named, steps)[number]
        gone = (missing or {}).get(number, ())
        give(named, {name: (size * scale * each.double()).to(dtype) for name, each in gradients.items() if name not in gone})

    def expected(**_: Any) -> Results:
        named, found = parameters(SHAPES, dtype), {}
        oracle = Oracle(named, ROLES, settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
        scaler.scale(torch.zeros(()))  # it is made at its first use
        wholes = [whole for _, whole in oracle.copies.values()]

        def act() -> tuple[float, bool]:
            carrier = torch.optim.SGD(wholes, lr=0.0)  # unscales for all rules at once; its own step moves nothing
            scaler.unscale_(carrier)
            good = all(bool(whole.grad.isfinite().all()) for whole in wholes if whole.grad is not None)
            norm = torch.nn.utils.clip_grad_norm_(wholes, max_norm).item()
            for whole, parts in oracle.pieces:  # gradients of parts are views of the whole's
                for number, part in enumerate(parts if whole.ndim == 3 else ()):
                    part.grad = None if whole.grad is None else whole.grad[number]
            scaler.step(carrier)
            if good:
                oracle.move()
            scaler.update()
            return norm, good

        for number in range(steps):
            scaled(named, number, scaler.get_scale())
            norm, good = oracle.step(act)
            found |= row(number, norm, good, scaler.get_scale(), named)
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        named, found = parameters(SHAPES, dtype), {}
        optimizer = made(adapters, named, ROLES, settings)
        scaler = adapters.loss_scale(start, growth, backoff, interval)
        for number in range(steps):
            scaled(named, number, float(adapters.scale_of(scaler)))
            norm, good = adapters.update(optimizer, scaler, max_norm)
            found |= row(number, float(norm), bool(good), float(adapters.scale_of(scaler)), named)
        return found

    given = {
        "bad steps": bad,
        "start": start,
        "growth": growth,
        "backoff": backoff,
        "interval": interval,
        "max_norm": max_norm,
        "dtype": str(dtype),
        "size of gradients": size,
        "eps": eps,
    }
    return Case("oracle", title, lambda: given, expected, SCALER, observe, **(tolerance or {"rtol": 2e-5, "atol": 2e-5}))


def row(number: int, norm: float, good: bool, scale: float, named: Named) -> Results:
    shown = norm if math.isfinite(norm) else "not finite"
    return {f"norm {number}": shown, f"step {number} made": good, f"loss scale after {number}": scale} | weights_of(
        named, f" after {number}"
    )


def state_case() -> Case:
    """A skipped step leaves the state as it was, and counts for nothing: what comes after it is as if it had not been."""

    def run(adapters: Any, bad: bool) -> Results:
        named = parameters(SHAPES, torch.float32)
        optimizer = made(adapters, named, ROLES, settings_of())
        scaler = adapters.loss_scale(4.0, 2.0, 0.5, 1000)
        for number, own in enumerate(script(named, 4)):
            if bad and number in (0, 2):
                give(named, {name: torch.full_like(each, math.nan) for name, each in own.items()})
                adapters.update(optimizer, scaler, 1.0)
            scale = float(adapters.scale_of(scaler))
            give(named, {name: scale * each for name, each in own.items()})
            adapters.update(optimizer, scaler, 1.0)
        return weights_of(named)

    def observe(adapters: Any, **_: Any) -> Results:
        with_bad, without = run(adapters, True), run(adapters, False)
        return {name: "the same" if torch.allclose(with_bad[name], without[name], rtol=1e-5, atol=1e-5) else "another" for name in with_bad}

    expected = lambda **_: dict.fromkeys(SHAPES, "the same")  # noqa: E731
    return Case("property", "skipped steps leave nothing behind", lambda: {"NaN before steps": [0, 2]}, expected, TEXT.format(8), observe)


INF, NAN = math.inf, math.nan

PRECISION = (
    dtypes_case(torch.bfloat16),
    small_steps_case("steps that bfloat16 cannot show", torch.bfloat16, 1e-3, **ROUNDED),
    small_steps_case("steps that float16 cannot show", torch.float16, 4e-4, rtol=2e-3, atol=1e-3),
    mixed_dtypes_case(),
    script_case("no bad step", {}),
    script_case("one bad step", {2: ("gate", INF)}),
    script_case("NaN in a batch of experts", {1: ("mlp", NAN)}),
    script_case("a bad norm's weight, first and last", {0: ("scale", -INF), 6: ("shift", NAN)}),
    script_case("two bad steps in a row", {2: ("out", INF), 3: ("tokens", INF)}, start=64.0),
    script_case("growth after one step", {3: ("down", NAN)}, growth=1.5, backoff=0.25, interval=1),
    script_case("growth after three steps", {4: ("down", NAN)}, steps=9, interval=3),
    script_case("a norm that is not clipped", {}, max_norm=1e6, start=1024.0),
    script_case("clipping with a large scale", {}, max_norm=0.5, start=65536.0, interval=100),
    script_case("gradients that are missing", {3: ("out", INF)}, missing={0: ("tokens", "gate"), 2: ("mlp",)}),
    script_case(
        "float16 gradients that vanish without the scale",
        {},
        steps=4,
        start=65536.0,
        interval=100,
        max_norm=1.0,
        dtype=torch.float16,
        size=1e-8,
        eps=1e-12,
        rtol=4e-3,
        atol=1e-3,
    ),
    script_case("bfloat16", {2: ("mlp", INF)}, dtype=torch.bfloat16, **ROUNDED),
    state_case(),
)
