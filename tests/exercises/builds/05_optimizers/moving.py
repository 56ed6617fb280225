"""Stages 2 to 4 of build 05: AdamW over many steps, the Newton-Schulz iteration, and Muon over many steps."""

from typing import Any

import torch
from torch import Tensor, nn

from shared.course.checking import Case

from .pieces import (
    ELEMENTWISE,
    MATRICES,
    MUON,
    NEAR,
    SHAPES,
    TEXT,
    Named,
    Oracle,
    Results,
    Script,
    by_singular_values,
    drive,
    give,
    made,
    parameters,
    randn,
    script,
    settings_of,
    steps_case,
)

PUBLISHED = MUON["ns_coefficients"]

# Stage 2: AdamW


def first_step_case() -> Case:  # a gradient of any size moves a weight by lr; 2 decays by 0.1 * 0.5 * 2 first
    settings = settings_of({"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.5})

    def observe(adapters: Any, **_: Any) -> Results:
        named = {"table": nn.Parameter(torch.tensor([[2.0, 2.0]], dtype=torch.float64))}
        optimizer = made(adapters, named, {"table": "embedding"}, settings)
        give(named, {"table": torch.tensor([[4.0, -1e-5]], dtype=torch.float64)})
        optimizer.step()
        return {"weights": named["table"].detach()}

    given = {"weights": [2.0, 2.0], "gradient": [4.0, -1e-5], **settings["adamw"]}
    expected = lambda **_: {"weights": torch.tensor([[1.8, 2.0]], dtype=torch.float64)}  # noqa: E731
    return Case("worked example", "one step", lambda: given, expected, TEXT.format(2), observe, **NEAR)


def plain_case() -> Case:
    """Gradients stay as they were; the optimizer extends PyTorch's base class, with the parameters in its groups."""

    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(ELEMENTWISE)
        storages = {name: weight.data_ptr() for name, weight in named.items()}
        settings = settings_of()
        roles = {"tokens": "embedding", "scale": "norm", "shift": "bias", "out": "head"}
        optimizer = adapters.make(iter(named.items()), roles, settings)
        [gradients] = script(named, 1)
        give(named, gradients)
        optimizer.step()
        held = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
        found = {
            "extends torch.optim.Optimizer": isinstance(optimizer, torch.optim.Optimizer),
            "groups hold each parameter once": sorted(held) == sorted(id(weight) for weight in named.values()),
            "rules": sorted({group["rule"] for group in optimizer.param_groups}),
            "decays": sorted({float(group["weight_decay"]) for group in optimizer.param_groups}),
            "gradients": all(torch.equal(named[name].grad, gradients[name]) for name in named),
            "weights where they were": all(weight.data_ptr() == storages[name] for name, weight in named.items()),
            "settings": settings == settings_of(),
            "gradients are recorded": torch.is_grad_enabled(),
        }
        optimizer.zero_grad()
        return found | {"after zero_grad": all(weight.grad is None or not weight.grad.any() for weight in named.values())}

    expected = {
        "extends torch.optim.Optimizer": True,
        "groups hold each parameter once": True,
        "rules": ["adamw"],
        "decays": [0.0, 0.3],
        "gradients": True,
        "weights where they were": True,
        "settings": True,
        "gradients are recorded": True,
        "after zero_grad": True,
    }
    return Case(
        "property", "an optimizer of PyTorch", lambda: {"parameters": list(ELEMENTWISE)}, lambda **_: expected, TEXT.format(2), observe
    )


def zeros(named: Named) -> Script:
    """Gradients, then only zeros: the means go on moving."""
    first, *others = script(named, 6)
    return [first, *[{name: torch.zeros_like(each) for name, each in own.items()} for own in others]]


def transposed(named: Named) -> Named:
    """Weights that are not contiguous."""
    return {name: nn.Parameter(weight.detach().mT.contiguous().mT) if weight.ndim > 1 else weight for name, weight in named.items()}


def transposed_gradients(named: Named) -> Script:
    return [{name: each.mT.contiguous().mT if each.ndim > 1 else each for name, each in own.items()} for own in script(named, 4)]


def dtype_case() -> Case:
    """Weights of float32."""

    def run(make: Any) -> Results:
        named = parameters(ELEMENTWISE, torch.float32)
        return drive(make(named).step, named, script(named, 4), 4)

    roles = {"tokens": "embedding", "scale": "norm", "shift": "bias", "out": "head"}
    expected = lambda **_: run(lambda named: Oracle(named, roles, settings_of()))  # noqa: E731
    observe = lambda adapters, **_: run(lambda named: made(adapters, named, roles, settings_of()))  # noqa: E731
    return Case(
        "oracle",
        "float32",
        lambda: {"parameters": list(ELEMENTWISE), "steps": 4},
        expected,
        "torch.optim.AdamW",
        observe,
        rtol=1e-5,
        atol=1e-6,
    )


ADAMW_STEPS = (
    first_step_case(),
    plain_case(),
    steps_case("six steps", ELEMENTWISE),
    steps_case("forty steps", ELEMENTWISE, steps=40),
    steps_case(
        "eps that shows",
        ELEMENTWISE,
        settings_of({"eps": 1e-3}),
        gradients=lambda named: [{name: 1e-7 * each for name, each in own.items()} for own in script(named, 6)],
    ),
    steps_case("no decay, other betas", ELEMENTWISE, settings_of({"weight_decay": 0.0, "betas": (0.0, 0.5)})),
    steps_case("a beta2 of 0", ELEMENTWISE, settings_of({"betas": (0.9, 0.0), "weight_decay": 1.0})),
    steps_case("a learning rate of 0", ELEMENTWISE, settings_of({"lr": 0.0})),
    steps_case("gradients of zeros after the first", ELEMENTWISE, gradients=zeros),
    steps_case("weights that are not contiguous", ELEMENTWISE, prepare=transposed),
    steps_case("gradients that are not contiguous", ELEMENTWISE, gradients=transposed_gradients, steps=4),
    dtype_case(),
)

# Stage 3: Newton-Schulz


def schulz_case(
    title: str,
    shape: tuple[int, ...],
    steps: int = 5,
    coefficients: tuple[float, float, float] = PUBLISHED,
    eps: float = 1e-7,
    size: float = 1.0,
    dtype: torch.dtype = torch.float64,
    layout: str = "",
    **tolerance: Any,
) -> Case:
    def given() -> Results:
        matrices = size * randn(*shape, seed=3, dtype=dtype)
        if layout == "transposed":
            matrices = matrices.mT.contiguous().mT
        if layout == "sizes":  # of a batch, each matrix is a hundred times the one before
            matrices = matrices * 100.0 ** torch.arange(shape[0], dtype=dtype)[:, None, None]
        if layout == "a zero":
            matrices[1] = 0.0
        return {"matrices": matrices, "steps": steps, "coefficients": coefficients, "eps": eps}

    def expected(matrices: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> Results:
        flat = matrices.reshape(-1, *matrices.shape[-2:])
        parts = [by_singular_values(each, coefficients, steps, eps) for each in flat]
        return {"result": torch.stack(parts).view(matrices.shape).to(dtype)}

    observe = lambda adapters, **given: {"result": adapters.newton_schulz(**given)}  # noqa: E731
    return Case("oracle", title, given, expected, "torch.linalg.svd: the polynomial of each singular value", observe, **(tolerance or NEAR))


def singular_values_case() -> Case:
    """After five iterations with the published coefficients, between some 0.7 and 1.2."""

    def observe(adapters: Any, **_: Any) -> Results:
        found = adapters.newton_schulz(randn(12, 30, seed=5), 5, PUBLISHED, 1e-7)
        values = torch.linalg.svdvals(found)
        return {"within 0.6 and 1.3": bool(((values > 0.6) & (values < 1.3)).all()), "shape": list(found.shape)}

    expected = lambda **_: {"within 0.6 and 1.3": True, "shape": [12, 30]}  # noqa: E731
    return Case("property", "singular values near 1", lambda: {"matrix": "[12, 30], of random numbers"}, expected, TEXT.format(3), observe)


NEWTON_SCHULZ = (
    singular_values_case(),
    schulz_case("one iteration", (3, 5), steps=1),
    schulz_case("a wide matrix", (4, 9)),
    schulz_case("a tall matrix", (9, 4)),
    schulz_case("a square matrix", (6, 6)),
    schulz_case("other coefficients, three iterations", (5, 7), 3, (1.5, -0.5, 0.0)),
    schulz_case("a cubic with a term of the fifth degree", (7, 5), 2, (1.875, -1.25, 0.375)),
    schulz_case("a large matrix", (4, 6), size=1e6),
    schulz_case("a small matrix", (4, 6), size=1e-5, rtol=1e-8, atol=1e-10),
    schulz_case("a matrix smaller than eps", (4, 6), size=1e-9),
    schulz_case("an eps that shows", (4, 6), eps=10.0),
    schulz_case("a batch", (3, 4, 6)),
    schulz_case("a batch of tall matrices", (3, 6, 4)),
    schulz_case("a batch whose number is that of the rows", (4, 4, 6)),
    schulz_case("a batch of matrices of many sizes", (3, 4, 6), layout="sizes"),
    schulz_case("a batch with zeros in it", (3, 4, 6), layout="a zero"),
    schulz_case("a batch of batches", (2, 3, 5, 4)),
    schulz_case("a batch of one", (1, 5, 4)),
    schulz_case("one row", (1, 6)),
    schulz_case("one column", (6, 1)),
    schulz_case("a matrix that is not contiguous", (4, 6), layout="transposed"),
    schulz_case("float32", (5, 8), dtype=torch.float32, rtol=1e-4, atol=1e-4),
    schulz_case("bfloat16", (5, 8), dtype=torch.bfloat16, rtol=0.1, atol=0.1),
)

# Stage 4: Muon


def second_step(named: Named) -> Script:
    [first] = script(named, 1)  # the second is the first, turned round and smaller: the momentum decides
    return [first, {name: -0.3 * each for name, each in first.items()}, {name: each.flip(-1) for name, each in first.items()}]


def in_bfloat16_case(title: str, scale: str) -> Case:
    """torch.optim.Muon as it stands, whose Newton-Schulz has three digits."""
    settings = settings_of(muon={"adjust_lr_fn": scale})
    shapes = {"a": (24, 16), "b": (16, 24)}
    roles = {"a": "matrix", "b": "matrix"}

    def run(make: Any) -> Results:
        named = parameters(shapes, torch.float32)
        return drive(make(named).step, named, script(named, 5), 5)

    expected = lambda **_: run(lambda named: Oracle(named, roles, settings, exact=False))  # noqa: E731
    observe = lambda adapters, **_: run(lambda named: made(adapters, named, roles, settings))  # noqa: E731
    return Case("oracle", title, lambda: {"shapes": shapes, **settings}, expected, "torch.optim.Muon", observe, rtol=0.0, atol=4e-3)


BATCH, SQUARE = {"mlp": SHAPES["mlp"]}, {"gate": (5, 5), "down": (4, 12)}


def experts_without_tokens(named: Named) -> Script:
    found = script(named, 5)
    for number, own in enumerate(found):
        own["mlp"][number % 2] = 0.0
    return found


def zero_first(named: Named) -> Script:
    first, *others = script(named, 5)
    return [{name: torch.zeros_like(each) for name, each in first.items()}, *others]


def rules_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        named = parameters(MATRICES | BATCH)
        roles = {"gate": "matrix", "down": "matrix", "mlp": "experts"}
        optimizer = made(adapters, named, roles, settings_of())
        [gradients] = script(named, 1)
        give(named, gradients)
        optimizer.step()
        kept = all(torch.equal(named[name].grad, gradients[name]) for name in named)
        return {"rules": sorted({group["rule"] for group in optimizer.param_groups}), "gradients": kept}

    expected = lambda **_: {"rules": ["muon"], "gradients": True}  # noqa: E731
    return Case(
        "property", "groups, and gradients as they were", lambda: {"parameters": [*MATRICES, *BATCH]}, expected, TEXT.format(4), observe
    )


MUON_STEPS = (
    rules_case(),
    steps_case("one step", MATRICES, steps=1),
    steps_case("six steps", MATRICES),
    steps_case("forty steps", MATRICES, steps=40, rtol=1e-7, atol=1e-8),
    steps_case("without Nesterov", MATRICES, settings_of(muon={"nesterov": False})),
    steps_case("gradients that turn round", MATRICES, gradients=second_step, steps=3),
    steps_case("another momentum", MATRICES, settings_of(muon={"momentum": 0.5})),
    steps_case("no momentum", MATRICES, settings_of(muon={"momentum": 0.0})),
    steps_case("no decay", MATRICES, settings_of(muon={"weight_decay": 0.0})),
    steps_case("the scale that matches AdamW's", MATRICES, settings_of(muon={"adjust_lr_fn": "match_rms_adamw"})),
    steps_case("square, and wide", SQUARE, settings_of(muon={"adjust_lr_fn": "match_rms_adamw", "lr": 0.1})),
    steps_case("square, and wide, with the original scale", SQUARE),
    steps_case("other coefficients and iterations", MATRICES, settings_of(muon={"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 3})),
    steps_case("an eps that shows", MATRICES, settings_of(muon={"eps": 3.0})),
    steps_case("a batch of experts", BATCH),
    steps_case("a batch of experts, wide", {"mlp": (4, 3, 7)}, settings_of(muon={"adjust_lr_fn": "match_rms_adamw"})),
    steps_case("as many experts as rows", {"mlp": (6, 6, 4)}),
    steps_case("experts without a token", BATCH, gradients=experts_without_tokens, steps=5),
    steps_case("a first gradient of zeros", MATRICES | BATCH, gradients=zero_first, steps=5),
    steps_case("weights that are not contiguous", MATRICES | BATCH, prepare=transposed),
    in_bfloat16_case("torch.optim.Muon as it stands", "original"),
    in_bfloat16_case("torch.optim.Muon as it stands, and the other scale", "match_rms_adamw"),
)
