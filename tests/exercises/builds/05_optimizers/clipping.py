"""Stage 6 of build 05: clipping by the global norm, against torch.nn.utils.clip_grad_norm_ in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.checking import Case

from .pieces import EXACT, NEAR, ROLES, SHAPES, TEXT, Named, Results, give, made, parameters, randn, script, settings_of, weights_of


def clip_case(
    title: str,
    max_norm: float,
    size: float = 1.0,
    without: tuple[str, ...] = (),
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    edit: Callable[[dict[str, Tensor]], Any] = lambda own: None,
    **tolerance: Any,
) -> Case:
    """torch.nn.utils.clip_grad_norm_ of float64 copies. It divides by norm + 1e-6, so the tolerance is 1e-5."""

    def gradients(named: Named) -> dict[str, Tensor]:
        [own] = script(named, 1, without={0: without})
        own = {name: (size * each).to(dtype) for name, each in own.items()}
        edit(own)
        return own

    def expected(**_: Any) -> Results:
        named = parameters(SHAPES, dtype)
        own = gradients(named)
        copies = {name: nn.Parameter(weight.detach().double()) for name, weight in named.items()}
        give(copies, {name: each.double() for name, each in own.items()})
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), max_norm).item()
        clipped = {name: own[name] if norm <= max_norm else copies[name].grad.to(dtype) for name in own}
        return {"norm": norm} | {f"gradient of {name}": each for name, each in clipped.items()}

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES, dtype)
        pairs = [*named.items(), *([("logits", named["tokens"])] if tied else [])]
        optimizer = adapters.make(iter(pairs), ROLES | {"logits": "head"}, settings_of())
        give(named, gradients(named))
        norm = float(adapters.clip(optimizer, max_norm))
        return {"norm": norm} | {f"gradient of {name}": each.grad for name, each in named.items() if each.grad is not None}

    given = {"max_norm": max_norm, "size of gradients": size, "without": without, "dtype": str(dtype)}
    return Case(
        "oracle",
        title,
        lambda: given,
        expected,
        "torch.nn.utils.clip_grad_norm_, in float64",
        observe,
        **(tolerance or {"rtol": 1e-5, "atol": 1e-12}),
    )


def worked_clip_case() -> Case:
    """A norm of 5 over two parameters, of which neither is above 4."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = {"a": nn.Parameter(torch.zeros(2).double()), "b": nn.Parameter(torch.zeros(1, 1).double())}
        optimizer = made(adapters, named, {"a": "norm", "b": "matrix"}, settings_of())
        give(named, {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([[4.0]]).double()})
        norm = float(adapters.clip(optimizer, 2.5))
        return {"norm": norm, "a": named["a"].grad, "b": named["b"].grad}

    expected = {"norm": 5.0, "a": torch.tensor([1.5, 0.0]).double(), "b": torch.tensor([[2.0]]).double()}
    return Case(
        "worked example",
        "a norm of 5",
        lambda: {"gradients": [[3.0, 0.0], [[4.0]]], "max_norm": 2.5},
        lambda **_: expected,
        TEXT.format(6),
        observe,
        rtol=1e-5,
    )


def untouched_case(title: str, max_norm: float, gradients: bool = True) -> Case:
    """Where nothing is clipped no bit changes; and weights and groups never do."""

    def run(clip: Callable[[Named], float]) -> Results:
        named = parameters(SHAPES, torch.float32)
        give(named, script(named, 1)[0] if gradients else {})
        clip(named)
        return weights_of(named) | {f"gradient of {name}": each.grad for name, each in named.items() if each.grad is not None}

    def norm_of(adapters: Any) -> Callable[[Named], float]:
        return lambda named: adapters.clip(made(adapters, named, ROLES, settings_of()), max_norm)

    given = {"max_norm": max_norm, "gradients": gradients}
    return Case(
        "property",
        title,
        lambda: given,
        lambda **_: run(lambda named: 0.0),
        TEXT.format(6),
        lambda adapters, **_: run(norm_of(adapters)),
        **EXACT,
    )


def without_any_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(SHAPES)
        return {"norm": float(adapters.clip(made(adapters, named, ROLES, settings_of()), 1.0))}

    return Case("property", "no gradient at all", lambda: {"gradients": None}, lambda **_: {"norm": 0.0}, TEXT.format(6), observe, **EXACT)


def strangers_case() -> Case:
    """A frozen parameter with a gradient from elsewhere does not count."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters({"gate": (6, 4), "scale": (4,)})
        named["scale"].requires_grad_(False)
        optimizer = made(adapters, named, ROLES, settings_of())
        give(named, {"gate": torch.full((6, 4), 0.5).double(), "scale": randn(4)})
        norm = float(adapters.clip(optimizer, 100.0))
        return {"norm": norm}

    return Case(
        "property", "a frozen parameter", lambda: {"frozen": "scale"}, lambda **_: {"norm": 24**0.5 * 0.5}, TEXT.format(6), observe, **NEAR
    )


def zero_some(own: dict[str, Tensor]) -> None:
    for name in ("tokens", "gate"):
        own[name].zero_()


CLIP = (
    worked_clip_case(),
    clip_case("all roles", 1.0),
    clip_case("a small norm", 1e-3),
    clip_case("large gradients", 2.0, size=1e6),
    clip_case("small gradients", 1e-6, size=1e-3, rtol=2e-3, atol=0.0),
    clip_case("gradients that are missing", 0.5, without=("tokens", "mlp")),
    clip_case("gradients of zeros", 0.5, edit=zero_some),
    clip_case("a tied head", 1.0, tied=True),
    clip_case("float32", 1.0, dtype=torch.float32, rtol=1e-5, atol=1e-6),
    clip_case("bfloat16", 1.0, dtype=torch.bfloat16, rtol=1e-2, atol=1e-4),
    clip_case("float16, whose squares overflow", 1.0, size=300.0, dtype=torch.float16, rtol=3e-3, atol=1e-5),
    clip_case("float16, whose squares vanish", 1e-3, size=1e-4, dtype=torch.float16, rtol=1e-2, atol=1e-6),
    untouched_case("a norm that is allowed", 1e6),
    untouched_case("an infinite max_norm", float("inf")),
    without_any_case(),
    strangers_case(),
)
