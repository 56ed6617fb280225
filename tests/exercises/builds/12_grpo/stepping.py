"""Stage 10 of build 12: steps of any optimizer over micro-batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .losing import losses_by_hand
from .pieces import (
    ALONE,
    PROMPTS,
    WITHIN,
    Attention,
    Recorded,
    Results,
    Rotary,
    alone,
    budget,
    case,
    gradients_of,
    made,
    randn,
    settings_of,
    weights_of,
)

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.3),
}
LENGTHS = [4, 1, 3, 2, 4, 1, 2]

Experience = tuple[list[int], list[int], list[float], float]


def experiences_of(count: int, temperature: float, model: Recorded, seed: int = 0) -> list[Experience]:
    """Answers of random tokens, with the log-probabilities of `model`."""
    found = []
    for number, (length, advantage) in enumerate(zip((LENGTHS * 3)[:count], randn(count, seed=seed).tolist(), strict=True)):
        prompt = PROMPTS[(number + seed) % 5]
        ids = torch.randint(11, (length,), generator=torch.Generator().manual_seed(100 * seed + number)).tolist()
        found.append((prompt, ids, alone(model, prompt, ids, temperature).tolist(), advantage))
    return found


def loss_of(model: Recorded, experiences: list[Experience], settings: Results) -> Tensor:
    """All experiences at once: each answer alone, and the mean that `aggregation` names."""
    found = []
    for prompt, ids, old, advantage in experiences:
        then, advantages = (torch.tensor([each], dtype=torch.float64) for each in (old, advantage))
        log_probs, mask = alone(model, prompt, ids, settings["temperature"])[None], torch.ones(1, len(ids), dtype=torch.bool)
        found.append(losses_by_hand(log_probs, then, advantages, mask, settings)[0])
    if settings["aggregation"] == "token":
        return torch.cat(found).mean()
    if settings["aggregation"] == "sequence":
        return torch.stack([each.mean() for each in found]).mean()
    return torch.cat(found).sum() / (len(found) * settings["limit"])


def by_hand(model: Recorded, optimizer: torch.optim.Optimizer, experiences: list[Experience], settings: Results) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, experiences, settings)
    loss.backward()
    optimizer.step()
    return loss.item()


def steps_case(title: str, counts: list[int], optimizer: str = "SGD", kind: Callable[[], Recorded] = Attention, **changes: Any) -> Case:
    """counts: experiences of each step. Loss, gradients and weights after each. The old log-probabilities are those of another model."""
    settings = settings_of(**changes)

    def results(act: Callable) -> Results:
        model, other = made(kind), made(kind)
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(0.1 * randn(*weight.shape, seed=5))
        made_optimizer, found = OPTIMIZERS[optimizer](list(model.parameters())), {}
        for number, count in enumerate(counts):
            experiences = experiences_of(count, settings["temperature"], other, seed=number)
            found[f"loss {number}"] = float(act(model, made_optimizer, experiences, dict(settings)))
            found |= {f"{name}, step {number}": each for name, each in (gradients_of(model) | weights_of(model)).items()}
        return found

    given = {"model": kind.__name__, "experiences of each step": counts, "optimizer": optimizer, **settings}
    return case(title, given, lambda: results(by_hand), lambda adapters: results(adapters.update), ALONE)


def zero_case(aggregation: str) -> Case:
    """Before the first update all ratios are 1, and advantages add up to 0: so does the loss."""
    settings = settings_of(aggregation=aggregation)

    def observe(adapters: Any) -> Results:
        model, experiences = made(Attention), []
        for number, advantage in enumerate((1.0, -1.5, 0.5)):
            ids = [number + 3, 2 * number]
            old = alone(model, PROMPTS[0], ids, settings["temperature"]).tolist()
            experiences.append((PROMPTS[0], ids, old, advantage))
        loss = float(adapters.update(model, OPTIMIZERS["SGD"](list(model.parameters())), experiences, settings))
        norm = max(0.0 if weight.grad is None else weight.grad.abs().max().item() for weight in model.parameters())
        return {"loss": abs(loss) < 1e-12 or loss, "largest gradient": "above 0.01" if norm > 0.01 else norm}

    expected = lambda: {"loss": True, "largest gradient": "above 0.01"}  # noqa: E731
    given = {"advantages": [1.0, -1.5, 0.5], "log-probabilities": "as they were drawn", "aggregation": aggregation}
    return case(f"a loss of 0, {aggregation}", given, expected, observe, 10, rung="worked example")


def micro_case() -> Case:
    """The weights after a step, with micro-batches of every size."""

    def observe(adapters: Any) -> Results:
        found = {}
        for size in (1, 2, 3, 5, 7, 100):
            model, experiences = made(Rotary), experiences_of(7, 0.8, made(Rotary, 2))
            adapters.update(model, OPTIMIZERS["SGD"](list(model.parameters())), experiences, settings_of(micro_size=size))
            found[str(size)] = weights_of(model)
        far = {size: max((found["7"][name] - each).abs().max().item() for name, each in own.items()) for size, own in found.items()}
        return {f"micro_size {size}": WITHIN if each < 1e-9 else f"off by {each:.3g}" for size, each in far.items()}

    expected = lambda: {f"micro_size {size}": WITHIN for size in (1, 2, 3, 5, 7, 100)}  # noqa: E731
    return case("micro-batches of every size", {"experiences": 7, **settings_of()}, expected, observe, 10, rung="property")


def left_case() -> Case:
    """What the caller gave is as it was, and the loss has no graph."""

    def observe(adapters: Any) -> Results:
        model, given, again = made(Attention), *(experiences_of(5, 0.8, made(Attention)) for _ in range(2))
        loss = adapters.update(model, OPTIMIZERS["SGD"](list(model.parameters())), given, settings_of())
        kept, said = "as they were" if given == again else "changed", "is a float" if type(loss) is float else str(type(loss))
        return {"experiences": kept, "the loss": said}

    expected = lambda: {"experiences": "as they were", "the loss": "is a float"}  # noqa: E731
    return case("the experiences stay as they are", {"experiences": 5}, expected, observe, 10, rung="property")


def calls_case() -> Case:
    names = "calls", "logits of other micro-batches that are held", "rows of a call"

    def observe(adapters: Any) -> Results:
        model = made(Attention)
        adapters.update(model, OPTIMIZERS["SGD"](list(model.parameters())), experiences_of(9, 0.8, made(Rotary)), settings_of(micro_size=4))
        held, rows = max(call.alive for call in model.calls[1:]), max(len(call.ids) for call in model.calls)
        both = budget(len(model.calls), 3, "calls"), budget(held, 0, "tensors"), budget(rows, 4, "rows")
        return dict(zip(names, both, strict=True))

    expected = lambda: dict.fromkeys(names, WITHIN)  # noqa: E731
    return case("one graph at a time", {"experiences": 9, "micro_size": 4}, expected, observe, 10, rung="budget")


UPDATE = (
    zero_case("token"),
    zero_case("sequence"),
    steps_case("one step, one micro-batch", [3]),
    steps_case("three micro-batches", [7], micro_size=3),
    steps_case("answers alike", [7], micro_size=3, aggregation="sequence"),
    steps_case("a constant", [7], micro_size=2, aggregation="constant"),
    steps_case("ratios of answers", [7], micro_size=3, level="sequence", aggregation="sequence"),
    steps_case("each step has gradients of its own", [7, 4, 2]),
    steps_case("momentum and weight decay", [3, 5, 2], "SGD with momentum", Rotary),
    steps_case("AdamW", [5, 7], "AdamW", micro_size=3, temperature=1.4),
    micro_case(),
    left_case(),
    calls_case(),
)
