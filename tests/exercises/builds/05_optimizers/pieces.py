"""What the stages of build 05 share: parameters with roles, scripts of gradients, and the oracle, made of torch.optim's optimizers.

torch.optim.Muon computes its Newton-Schulz in bfloat16. Where the check compares in float64, the polynomial is applied to the singular
values of `torch.linalg.svd` instead, which it is by definition: the iteration leaves singular vectors alone.
Tolerance in float64: sums in another order, through 5 iterations that may multiply an error by 3.4 each; 1e-9 leaves room.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shared.course.checking import Case

TEXT = "the text of build.py: stage {}"
TORCH = "torch.optim.AdamW and torch.optim.Muon, Newton-Schulz by singular values"
NEAR = {"rtol": 1e-9, "atol": 1e-10}
EXACT = {"rtol": 0.0, "atol": 0.0}
WITHIN = "within the budget"

Results = dict[str, Any]
Named = dict[str, nn.Parameter]
Script = list[dict[str, Tensor]]

ADAMW = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
MUON = {
    "lr": 0.02,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}


def settings_of(adamw: Results | None = None, muon: Results | None = None) -> Results:
    """Fresh settings, with changes."""
    return {"adamw": ADAMW | (adamw or {}), "muon": MUON | (muon or {})}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float64, seed: int = 1) -> Named:
    """Weights of their own, always the same."""
    return {name: nn.Parameter(randn(*shape, seed=seed + 7 * n, dtype=dtype)) for n, (name, shape) in enumerate(shapes.items())}


# A small model: every role, and what is not decided by shape alone
SHAPES = {"tokens": (7, 4), "gate": (6, 4), "scale": (4,), "down": (4, 6), "mlp": (3, 5, 4), "shift": (3, 5), "out": (7, 4)}
ROLES = {"tokens": "embedding", "gate": "matrix", "scale": "norm", "down": "matrix", "mlp": "experts", "shift": "bias", "out": "head"}
ELEMENTWISE = {name: SHAPES[name] for name in ("tokens", "scale", "shift", "out")}
MATRICES = {name: SHAPES[name] for name in ("gate", "down")}


def script(named: Named, steps: int, seed: int = 0, without: dict[int, tuple[str, ...]] | None = None) -> Script:
    """Gradients of each step, of sizes that differ by step. without: names that have none, by step."""
    found: Script = []
    for step in range(steps):
        size = (1.0, 0.1, 5.0)[step % 3]
        found.append(
            {
                name: size * randn(*weight.shape, seed=1000 + seed + 31 * step + n).to(weight.dtype)
                for n, (name, weight) in enumerate(named.items())
                if name not in (without or {}).get(step, ())
            }
        )
    return found


def give(named: Named, gradients: dict[str, Tensor]) -> None:
    for name, weight in named.items():
        weight.grad = gradients[name].clone() if name in gradients else None


def weights_of(named: Named, when: str = "") -> Results:
    return {f"{name}{when}": weight.detach().clone() for name, weight in named.items()}


# The oracle


def by_singular_values(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz of one matrix, in float64: the polynomial a s + b s^3 + c s^5 of each singular value, `steps` times."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt().clamp(min=eps)
    for _ in range(steps):
        values = sum(each * values ** (2 * power + 1) for power, each in enumerate(coefficients))
    return ((left * values) @ right).to(matrix.dtype)


class Oracle:
    """torch.optim.AdamW and torch.optim.Muon over the same parameters, each expert a parameter of its own, each half in float32.

    rules: for each parameter its rule, whether it decays, and further names' parameters are not listed.
    """

    def __init__(self, named: Named, roles: dict[str, str], settings: Results, exact: bool = True):
        self.exact, self.copies, self.pieces = exact, {}, []
        adamw: list[Results] = []
        muon: list[nn.Parameter] = []
        for name, weight in named.items():
            half = weight.dtype in (torch.bfloat16, torch.float16)
            whole = nn.Parameter(weight.detach().float()) if half else weight
            self.copies[name] = (weight, whole)
            if roles[name] == "matrix" and weight.ndim == 2 or roles[name] == "experts" and weight.ndim == 3:
                parts = [whole] if weight.ndim == 2 else [nn.Parameter(whole.detach()[number]) for number in range(len(whole))]
                self.pieces.append((whole, parts))
                muon += parts
            else:
                decays = roles[name] not in ("norm", "bias") and weight.ndim >= 2
                adamw.append({"params": [whole], "weight_decay": settings["adamw"]["weight_decay"] if decays else 0.0})
        self.optimizers: list[torch.optim.Optimizer] = []
        if adamw:
            self.optimizers.append(torch.optim.AdamW(adamw, **settings["adamw"], foreach=False))
        if muon:
            self.optimizers.append(torch.optim.Muon(muon, **settings["muon"]))

    def step(self, act: Callable[[], Any] | None = None) -> Any:
        """A step with the weights' gradients. act: what to do once gradients are float32, in place of the optimizers' steps."""
        for weight, whole in self.copies.values():
            if whole is not weight:
                whole.grad = None if weight.grad is None else weight.grad.float()
        for whole, parts in self.pieces:
            if whole.ndim == 3:
                for number, part in enumerate(parts):
                    part.grad = None if whole.grad is None else whole.grad[number]
        result = act() if act else self.move()
        with torch.no_grad():
            for weight, whole in self.copies.values():
                if whole is not weight:
                    weight.copy_(whole)
        return result

    def move(self) -> None:
        with exact_muon() if self.exact else ExitStack():
            for optimizer in self.optimizers:
                optimizer.step()


@contextmanager
def exact_muon() -> Iterator[None]:
    with mock.patch.object(import_module("torch.optim._muon"), "_zeropower_via_newtonschulz", by_singular_values):
        yield


# Cases


def drive(step: Callable[[], Any], named: Named, gradients: Script, every: int = 1) -> Results:
    """The weights after steps with given gradients."""
    found: Results = {}
    for number, own in enumerate(gradients, 1):
        give(named, own)
        step()
        if number % every == 0 or number == len(gradients):
            found |= weights_of(named, f" after step {number}")
    return found


def steps_case(
    title: str,
    shapes: dict[str, tuple[int, ...]],
    settings: Results | None = None,
    steps: int = 6,
    gradients: Callable[[Named], Script] | None = None,
    roles: dict[str, str] = ROLES,
    dtype: torch.dtype = torch.float64,
    prepare: Callable[[Named], Named] = lambda named: named,
    **tolerance: Any,
) -> Case:
    settings = settings or settings_of()
    made_gradients = gradients or (lambda named: script(named, steps))

    def expected(**_: Any) -> Results:
        named = prepare(parameters(shapes, dtype))
        return drive(Oracle(named, roles, settings).step, named, made_gradients(named), max(1, steps // 6))

    def observe(adapters: Any, **_: Any) -> Results:
        named = prepare(parameters(shapes, dtype))
        optimizer = made(adapters, named, roles, settings)
        return drive(optimizer.step, named, made_gradients(named), max(1, steps // 6))

    given = {"parameters": {name: f"{roles[name]} {list(shape)}" for name, shape in shapes.items()}, "steps": steps, **settings}
    return Case("oracle", title, lambda: given, expected, TORCH, observe, **(tolerance or NEAR))


def made(adapters: Any, named: Named, roles: dict[str, str], settings: Results) -> Any:
    return adapters.make(iter(named.items()), dict(roles), {section: dict(own) for section, own in settings.items()})


def refused(error: ValueError, said: tuple[str, ...], wanted: str) -> str:
    missing = [word for word in said if not any(each in str(error) for each in word.split("|"))]
    return wanted if not missing else f"ValueError, which does not say {missing[0].replace('|', ' or ')}: {error}"


def budget(value: float, limit: float, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


# Stages

FINISHED = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]

FUNCTIONS = [
    ("torch", "_fused_adamw_"),
    ("torch", "_fused_adam_"),
    ("torch.optim.adam", "adam"),
    ("torch.optim.adamw", "adamw"),
    ("torch.optim._muon", "muon"),
    ("torch.optim._muon", "_zeropower_via_newtonschulz"),
]


def closed(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} is what this build is to write.")

    return refuse


@contextmanager
def finished_ones_closed() -> Iterator[None]:
    """PyTorch's finished optimizers and what belongs to them refuse while an answer is observed."""
    with ExitStack() as stack:
        for kind in [*FINISHED, torch.amp.GradScaler]:
            stack.enter_context(mock.patch.object(kind, "__init__", closed(kind.__name__)))
        for place, name in FUNCTIONS:
            stack.enter_context(mock.patch.object(import_module(place), name, closed(f"{place}.{name}")))
        for name in ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"):
            stack.enter_context(mock.patch.object(torch.nn.utils, name, closed(name)))
        yield


def guarded(cases: Iterable[Case]) -> list[Case]:
    """Cases that are observed while PyTorch's finished optimizers refuse."""

    def of(case: Case) -> Case:
        def observe(adapters: Any, **given: Any) -> Results:
            with finished_ones_closed():
                return case.observe(adapters, **given)

        return replace(case, observe=observe)

    return [of(case) for case in cases]
