"""Stages 8 and 9 of build 11: steps over micro-batches by any optimizer, and metrics over them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import (
    ALONE,
    NEAR,
    SIZES,
    TEXT,
    VOCABULARY,
    WIDTH,
    Attention,
    Examples,
    Recorded,
    Recurrence,
    Results,
    Table,
    example,
    gradients_of,
    made,
    pair_losses,
    pairs_of,
    scores,
    settings_of,
    sums,
    tokens_of,
    weights_of,
)

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.3),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
}
WITHOUT = ("simpo", "orpo")

MicroBatches = list[tuple[Examples, Tensor | None]]


def micro_batches_of(sizes: list[int], settings: Results, seed: int = 0) -> MicroBatches:
    """The reference is another model."""
    found, reference = [], made(Recurrence, seed=9)
    for number, size in enumerate(sizes):
        examples = pairs_of((SIZES * 2)[number : number + size], seed=seed + number)
        found.append((examples, None if settings["loss"] in WITHOUT else scores(reference, examples)))
    return found


def joined(micro_batches: MicroBatches) -> tuple[Examples, Tensor | None]:
    examples = [pair for some, _ in micro_batches for pair in some]
    references = [reference for _, reference in micro_batches if reference is not None]
    return examples, torch.cat(references) if references else None


# Stage 8: step


def steps_case(
    title: str, sizes: list[list[int]], optimizer: str = "SGD", settings: Results | None = None, kind: Callable[[], Recorded] = Attention
) -> Case:
    """sizes: of each step's micro-batches. Loss, gradients and weights after each step."""
    settings = settings or settings_of(label_smoothing=0.1)

    def results(model: Recorded, step: Callable) -> Results:
        made_optimizer, found = OPTIMIZERS[optimizer](list(model.parameters())), {}
        for number, own in enumerate(sizes):
            found[f"loss {number}"] = step(made_optimizer, micro_batches_of(own, settings, seed=20 * number))
            found |= {f"{name}, step {number}": each for name, each in (gradients_of(model) | weights_of(model)).items()}
        return found

    def expected(**_: Any) -> Results:
        model = made(kind)

        def step(optimizer: torch.optim.Optimizer, micro_batches: MicroBatches) -> Tensor:
            optimizer.zero_grad()
            examples, reference = joined(micro_batches)
            loss = pair_losses(settings, sums(model, examples), reference, tokens_of(examples)).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return results(model, step)

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(kind)
        step = lambda optimizer, some: torch.as_tensor(adapters.step(model, optimizer, some, WIDTH, dict(settings)))  # noqa: E731
        return results(model, step)

    given = {"model": kind.__name__, "pairs of each step's micro-batches": sizes, "optimizer": optimizer, **settings}
    return Case("oracle", title, lambda: given, expected, ALONE, observe, **NEAR)


def graph_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        model, settings = made(Attention), settings_of()
        loss = adapters.step(model, OPTIMIZERS["SGD"](list(model.parameters())), micro_batches_of([2], settings), WIDTH, settings)
        return {"the loss": "has a graph" if getattr(loss, "requires_grad", False) else "has no graph"}

    expected = lambda **_: {"the loss": "has no graph"}  # noqa: E731
    return Case("property", "the loss without its graph", lambda: {"pairs": 2}, expected, TEXT.format(8), observe)


def mode_case() -> Case:
    """The model is in training mode in each call of a step, also after it was used as a reference."""

    def observe(adapters: Any, **_: Any) -> Results:
        model, settings = made(lambda: Attention(dropout=0.2)).eval(), settings_of()
        optimizer = OPTIMIZERS["SGD"](list(model.parameters()))
        adapters.step(model, optimizer, micro_batches_of([2, 1], settings), WIDTH, settings)
        found = {"first step": sorted({call.training for call in model.calls})}
        adapters.score(model, pairs_of(SIZES[:2]), WIDTH, 2)
        model.calls.clear()
        adapters.step(model, optimizer, micro_batches_of([1], settings), WIDTH, settings)
        return found | {"second step": sorted({call.training for call in model.calls})}

    expected = lambda **_: {"first step": [True], "second step": [True]}  # noqa: E731
    return Case("property", "training mode", lambda: {"model": "with dropout, in evaluation mode"}, expected, TEXT.format(8), observe)


def frozen_case() -> Case:
    """A weight that is frozen, and one that the optimizer does not have."""

    def results(adapters: Any = None) -> Results:
        model, settings = made(Attention), settings_of()
        model.places.weight.requires_grad_(False)
        optimizer = OPTIMIZERS["SGD"](list(model.head.parameters()))
        micro_batches = micro_batches_of([2, 3], settings)
        if adapters is not None:
            adapters.step(model, optimizer, micro_batches, WIDTH, settings)
        else:
            examples, reference = joined(micro_batches)
            pair_losses(settings, sums(model, examples), reference, tokens_of(examples)).mean().backward()
            optimizer.step()
        return weights_of(model) | gradients_of(model)

    given = {"trained": "the head alone", "frozen": "places.weight"}
    observe = lambda adapters, **_: results(adapters)  # noqa: E731
    return Case("oracle", "a part is trained", lambda: given, lambda **_: results(), ALONE, observe, **NEAR)


STEP = (
    steps_case("one step, one micro-batch", [[3]]),
    steps_case("micro-batches of several sizes", [[1, 4, 2]]),
    steps_case("each step has gradients of its own", [[2, 3], [4]]),
    steps_case("momentum and weight decay", [[2, 3], [4], [1, 1]], "SGD with momentum", kind=Recurrence),
    steps_case("AdamW", [[3], [2, 2]], "AdamW"),
    steps_case("Adagrad", [[3], [2, 2]], "Adagrad"),
    steps_case("IPO, which counts tokens", [[1, 3]], settings=settings_of("ipo")),
    steps_case("SimPO, without a reference", [[1, 3]], settings=settings_of("simpo", 2.0, gamma=0.4)),
    steps_case("ORPO, without a reference", [[3, 1], [2]], settings=settings_of("orpo")),
    frozen_case(),
    graph_case(),
    mode_case(),
)

# Stage 9: metrics


def averages(model: Recorded, micro_batches: MicroBatches, settings: Results) -> Results:
    examples, reference = joined(micro_batches)
    policy, tokens = scores(model, examples), tokens_of(examples)
    rewards = settings["beta"] * (policy / tokens if reference is None else policy - reference)
    chosen, rejected = rewards.unbind(1)
    found = {"loss": pair_losses(settings, policy, reference, tokens), "chosen": chosen, "rejected": rejected}
    found |= {"margin": chosen - rejected, "accuracy": (chosen > rejected).double()}
    return {name: each.mean().item() for name, each in found.items()}


def metrics_case(title: str, sizes: list[int], settings: Results, seed: int = 0) -> Case:
    def expected(**_: Any) -> Results:
        return averages(made(Attention), micro_batches_of(sizes, settings, seed), settings)

    def observe(adapters: Any, **_: Any) -> Results:
        found = adapters.evaluate(made(Attention), micro_batches_of(sizes, settings, seed), WIDTH, dict(settings))
        return {name: float(value) for name, value in dict(found).items()}

    given = {"pairs of the micro-batches": sizes, "reference": "another model", **settings}
    return Case("oracle", title, lambda: given, expected, ALONE, observe, **NEAR)


def equal_case() -> Case:
    """All tokens are equally likely, answers have one token each, and the reference says 0: in the second pair it says -1 of rejected."""
    examples = [(example([1], [number]), example([1], [number + 5])) for number in range(2)]
    reference = torch.tensor([[0.0, 0.0], [0.0, -1.0]], dtype=torch.float64)

    def observe(adapters: Any, **_: Any) -> Results:
        model = Table(torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64))
        found = dict(adapters.evaluate(model, [(examples, reference)], WIDTH, settings_of(beta=0.5)))
        return {name: float(found[name]) for name in ("margin", "accuracy")}

    given = {"pairs": 2, "rewards": "equal in the first, in the second that of rejected is 0.5 higher"}
    expected = lambda **_: {"margin": -0.25, "accuracy": 0.0}  # noqa: E731
    return Case("worked example", "rewards that are equal", lambda: given, expected, TEXT.format(9), observe, **NEAR)


def quiet_case() -> Case:
    """No gradients, weights as they were, dropout off, and modes as they were."""

    def observe(adapters: Any, **_: Any) -> Results:
        model, settings = made(lambda: Attention(dropout=0.5)).train(), settings_of()
        model.head.eval()
        found = dict(adapters.evaluate(model, micro_batches_of([2, 1], settings), WIDTH, settings))
        recorded = sorted({call.gradients for call in model.calls})
        modes = {"model": model.training, "dropout": model.dropout.training, "head": model.head.training}
        return {"loss": float(found["loss"]), "gradients were recorded": recorded} | modes | gradients_of(model) | weights_of(model)

    def expected(**_: Any) -> Results:
        model, settings = made(Attention), settings_of()
        loss = averages(model, micro_batches_of([2, 1], settings), settings)["loss"]
        found = {"loss": loss, "gradients were recorded": [False], "model": True, "dropout": True, "head": False}
        return found | gradients_of(model) | weights_of(model)

    given = {"model": "with dropout, in training mode; its head in evaluation mode"}
    return Case("property", "the model stays as it was", lambda: given, expected, TEXT.format(9), observe, **NEAR)


METRICS = (
    equal_case(),
    metrics_case("one micro-batch", [4], settings_of()),
    metrics_case("micro-batches of several sizes", [1, 4, 2], settings_of(label_smoothing=0.1)),
    metrics_case("another beta, other pairs", [5, 1], settings_of(beta=1.7), seed=3),
    metrics_case("IPO", [1, 3], settings_of("ipo")),
    metrics_case("SimPO", [1, 3], settings_of("simpo", 2.0, gamma=0.4)),
    metrics_case("ORPO", [3, 2], settings_of("orpo")),
    quiet_case(),
)
