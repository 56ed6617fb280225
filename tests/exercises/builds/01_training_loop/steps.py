"""Stages 3 and 4 of build 01: the loss as sum and count, and steps over micro-batches by any optimizer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.checking import Case

from .pieces import (
    IGNORED,
    NEAR,
    TEXT,
    Averages,
    Batches,
    Recorded,
    Results,
    generator,
    gradients_of,
    made,
    nats,
    randn,
    weights_of,
)

# Stage 3: loss


def loss_case(
    title: str, shape: tuple[int, ...], ignored: float = 0.0, dtype: torch.dtype = torch.float64, scale: float = 1.0, seed: int = 0
) -> Case:
    """Value, count and gradient against PyTorch's cross-entropy of each target alone, in float64."""
    logits = (scale * randn(*shape, seed=seed)).to(dtype)
    targets = torch.randint(shape[-1], shape[:-1], generator=generator(seed))
    targets[torch.rand(shape[:-1], generator=generator(seed + 1)) < ignored] = IGNORED
    wide = torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: NEAR, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}.get(dtype, {"rtol": 1e-2, "atol": 1e-2})

    def found(total: Tensor, count: Any, leaf: Tensor) -> Results:
        (total * 0.75).backward()
        return {"sum": total.detach(), "count": count, "gradient": leaf.grad}

    def observe(adapters: Any, **_: Any) -> Results:
        leaf = logits.clone().requires_grad_()
        return found(*adapters.loss(leaf, targets.clone()), leaf)

    def expected(**_: Any) -> Results:
        leaf = logits.clone().requires_grad_()
        flat, wanted = leaf.to(wide).reshape(-1, shape[-1]), targets.flatten()
        kept = wanted != IGNORED
        total = -torch.distributions.Categorical(logits=flat[kept]).log_prob(wanted[kept]).sum() if kept.any() else flat.sum() * 0
        return found(total, kept.sum(), leaf)

    given = {"logits": list(shape), "dtype": str(dtype), "targets that count": int((targets != IGNORED).sum())}
    return Case("oracle", title, lambda: given, expected, "torch.distributions", observe, **tolerance)


def sum_of_halves_case() -> Case:
    """1,000 targets in half precision: a sum of 16-bit numbers would be wrong by more than a thousandth."""
    logits, targets = randn(1000, 50, seed=3).to(torch.bfloat16), torch.randint(50, (1000,), generator=generator(4))
    expected = {"sum": F.cross_entropy(logits.float(), targets, reduction="sum")}
    observe = lambda adapters, **_: {"sum": adapters.loss(logits, targets)[0]}  # noqa: E731
    given, title = {"logits": "[1000, 50] bfloat16"}, "half precision is computed in float32"
    return Case("property", title, lambda: given, lambda **_: expected, TEXT.format(3), observe, rtol=1e-5)


LOSS = (
    loss_case("one target", (1, 4)),
    loss_case("rows and columns", (3, 5, 7), seed=1),
    loss_case("another vocabulary", (2, 3, 4, 300), seed=2),
    loss_case("targets that do not count", (4, 6, 11), 0.4, seed=3),
    loss_case("float32", (2, 6, 11), 0.2, torch.float32, seed=4),
    loss_case("large logits", (5, 9), dtype=torch.float32, scale=8000.0, seed=5),
    loss_case("bfloat16", (5, 9), 0.2, torch.bfloat16, seed=6),
    loss_case("no target counts", (2, 3, 5), 1.1, seed=7),
    sum_of_halves_case(),
)

# Stage 4: step

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.3),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
}
VOCABULARY = 23
Sizes = list[tuple[int, int, float]]  # of each micro-batch: rows, columns, the share of targets that do not count


def batches_of(sizes: Sizes, seed: int = 0, vocabulary: int = VOCABULARY) -> Batches:
    source, found = generator(seed), []
    for rows, columns, ignored in sizes:
        inputs, targets = torch.randint(vocabulary, (2, rows, columns), generator=source)
        targets[torch.rand(rows, columns, generator=source) < ignored] = IGNORED
        found.append((inputs, targets))
    return found


def small() -> Recorded:
    return made(lambda: Averages(VOCABULARY))


def steps_case(title: str, sizes: list[Sizes], optimizer: str = "SGD", stale: bool = False) -> Case:
    """sizes: of each step's micro-batches. Loss, gradients and weights after each step. stale: there are gradients before the first."""

    def results(model: Recorded, step: Callable) -> Results:
        made_optimizer, found = OPTIMIZERS[optimizer](list(model.parameters())), {}
        if stale:
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight) if weight.requires_grad else None
        for number, own in enumerate(sizes):
            found[f"loss {number}"] = step(made_optimizer, batches_of(own, seed=20 * number))
            found |= {f"{name}, step {number}": each for name, each in (gradients_of(model) | weights_of(model)).items()}
        return found

    def expected(**_: Any) -> Results:
        model = small()

        def step(optimizer: torch.optim.Optimizer, batches: Batches) -> Tensor:
            optimizer.zero_grad()
            loss = nats(model, batches)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return results(model, step)

    def observe(adapters: Any, **_: Any) -> Results:
        model = small()
        return results(model, lambda optimizer, batches: torch.as_tensor(adapters.step(model, optimizer, batches)))

    given = {"rows, columns, share of targets that do not count": sizes, "optimizer": optimizer}
    return Case("oracle", title, lambda: given, expected, "one batch, row by row, with PyTorch's cross-entropy", observe, **NEAR)


def returned_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        model = small()
        loss = adapters.step(model, OPTIMIZERS["SGD"](list(model.parameters())), batches_of([(2, 3, 0.0)]))
        return {"is a tensor": isinstance(loss, Tensor), "shape": list(loss.shape), "has a graph": bool(loss.requires_grad)}

    expected = {"is a tensor": True, "shape": [], "has a graph": False}
    return Case("property", "what it returns", lambda: {"micro-batches": 1}, lambda **_: expected, TEXT.format(4), observe)


def mode_case() -> Case:
    """A model that comes from an evaluation, with dropout. Whatever was accumulated over, it is in training mode."""

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(lambda: Averages(VOCABULARY, dropout=0.2)).eval()
        adapters.step(model, OPTIMIZERS["SGD"](list(model.parameters())), batches_of([(2, 3, 0.0), (1, 2, 0.0)]))
        recorded = {f"call {number} in training mode": call.training for number, call in enumerate(model.calls)}
        return recorded | {"dropout in training mode": model.dropout.training}

    expected = {"call 0 in training mode": True, "call 1 in training mode": True, "dropout in training mode": True}
    return Case("property", "training mode", lambda: {"model": "in evaluation mode"}, lambda **_: expected, TEXT.format(4), observe)


def graphs_case() -> Case:
    """Each micro-batch in one call, and no earlier one's logits then. A step leaves no graph behind."""
    sizes: Sizes = [(2, 9, 0.0), (3, 4, 0.5), (1, 12, 0.0), (2, 2, 0.0)]

    def observe(adapters: Any, **_: Any) -> Results:
        model = small()
        optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
        loss = adapters.step(model, optimizer, batches_of(sizes))
        left = sum(not storage.expired() for storage in model.storages)
        found = {"ids of each call": [list(call.ids.shape) for call in model.calls], "a loss": loss is not None}
        found["values of earlier graphs held at a call"] = max(call.alive for call in model.calls)
        return found | {"values held after the step": left}

    expected = {"ids of each call": [[2, 9], [3, 4], [1, 12], [2, 2]], "a loss": True}
    expected |= {"values of earlier graphs held at a call": 0, "values held after the step": 0}
    return Case("budget", "one graph at a time", lambda: {"rows, columns, ignored": sizes}, lambda **_: expected, TEXT.format(4), observe)


class Tied(Averages):
    """The head's matrix is the embedding's."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.bend = nn.Linear(5, 5)
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.head = nn.Linear(5, VOCABULARY)
        self.head.weight = self.tokens.weight


def groups_case() -> Case:
    """Two groups of parameters, one of which the optimizer does not have at all, and a matrix that two modules share."""

    def results(step: Callable) -> Results:
        model, found = made(Tied), {}
        groups = [{"params": [model.tokens.weight], "lr": 0.05}, {"params": list(model.bend.parameters()), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
        for number in range(3):
            step(model, optimizer, batches_of([(2, 5, 0.2), (3, 3, 0.1)], seed=number))
            found |= {f"{name}, step {number}": each for name, each in weights_of(model).items()}
        return found

    def right(model: Recorded, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        optimizer.zero_grad()
        nats(model, batches).backward()
        optimizer.step()

    expected, observe = lambda **_: results(right), lambda adapters, **_: results(adapters.step)  # noqa: E731
    given = {"groups": ["embedding, also the head's matrix", "the bend"], "steps": 3}
    return Case("oracle", "groups of parameters, and a shared matrix", lambda: given, expected, "one batch, row by row", observe, **NEAR)


STEP = (
    steps_case("one micro-batch", [[(2, 5, 0.0)]]),
    returned_case(),
    steps_case("two of one size", [[(2, 5, 0.0), (2, 5, 0.0)]]),
    steps_case("gradients from before", [[(2, 5, 0.0)]], stale=True),
    steps_case("uneven micro-batches", [[(1, 3, 0.0), (4, 6, 0.0), (2, 1, 0.0)]]),
    steps_case("targets that do not count", [[(2, 8, 0.8), (3, 4, 0.0)]]),
    steps_case("no target of a micro-batch counts", [[(2, 4, 1.1), (2, 3, 0.0)]]),
    steps_case("three steps with momentum", [[(2, 5, 0.0), (1, 2, 0.0)], [(1, 7, 0.3)], [(3, 3, 0.0)]], "SGD with momentum"),
    steps_case("three steps of AdamW", [[(2, 5, 0.0), (1, 2, 0.5)], [(1, 7, 0.3)], [(3, 3, 0.0), (1, 9, 0.0)]], "AdamW"),
    steps_case("three steps of Adagrad", [[(2, 5, 0.0)], [(1, 7, 0.3), (4, 2, 0.0)], [(3, 3, 0.0)]], "Adagrad"),
    groups_case(),
    mode_case(),
    graphs_case(),
)
