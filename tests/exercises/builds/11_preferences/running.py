"""Stage 10 of build 11: many steps over pairs in an order, and what the model learns by them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case
from shared.course.comparing import Said

from .pieces import (
    ALONE,
    NEAR,
    SIZES,
    TEXT,
    WIDTH,
    Attention,
    Call,
    Examples,
    Recorded,
    Results,
    example,
    made,
    pair_losses,
    pairs_of,
    scores,
    settings_of,
    sums,
    tokens_of,
    weights_of,
)

MARK = 15  # pair n's prompt begins with the token MARK + n, twice; no answer has it
PAIRS = 7


def marked(count: int = PAIRS) -> Examples:
    found = []
    for number, (size, pair) in enumerate(zip((SIZES * 3)[:count], pairs_of((SIZES * 3)[:count], seed=8, vocabulary=MARK), strict=True)):
        answers = [ids[size[0] :][: WIDTH - 3] for ids, _ in pair]
        found.append(tuple(example([MARK + number] * 2, answer) for answer in answers))
    return found


def pairs_in(call: Call) -> list[int]:
    """The numbers of the pairs that a call's input has."""
    twice = (call.ids[:, 1:] == call.ids[:, :-1]) & (call.ids[:, 1:] >= MARK)
    return sorted(set((call.ids[:, 1:][twice] - MARK).tolist()))


class Noted(torch.optim.SGD):
    """An optimizer that notes its steps in the model's journal."""

    def __init__(self, model: Recorded):
        super().__init__(model.parameters(), lr=0.01)
        self.journal = model.journal

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.journal.append("step")


def steps_in(journal: list[Any]) -> list[list[list[int]]]:
    """The pairs of each micro-batch of each step."""
    found: list[list[list[int]]] = [[]]
    for noted in journal:
        if noted == "step":
            found.append([])
        else:
            found[-1].append(pairs_in(noted))
    return found[:-1]


def started(adapters: Any, model: Recorded, optimizer: torch.optim.Optimizer, examples: Examples, **more: Any) -> Any:
    given = {"width": WIDTH, "settings": settings_of(), "batch_size": 3, "micro_size": 2, "seed": 0} | more
    return adapters.start(model, optimizer, examples, *given.values())


# Stage 10: train


def order_of(adapters: Any, seed: int, parts: tuple[int, ...] = (6,), noise: int = 0) -> list[list[list[int]]]:
    """The pairs of each micro-batch of each step. noise: what PyTorch's generator begins with."""
    torch.manual_seed(noise)
    model = made(Attention)
    run = started(adapters, model, Noted(model), marked(), seed=seed)
    del model.journal[:]
    for steps in parts:
        adapters.advance(run, steps)
    return steps_in(model.journal)


def order_case() -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        steps = order_of(adapters, 5)
        flat = [sorted({pair for micro in own for pair in micro}) for own in steps]
        most = max(len(micro) for own in steps for micro in own)
        epochs = [flat[:3], flat[3:]]
        orders = [[pair for own in epoch for pair in own] for epoch in epochs]
        differs = [[set(own) for own in epoch] for epoch in epochs]
        return {
            "pairs of each step": [len(own) for own in flat], "pairs of a call": "at most micro_size" if most <= 2 else f"{most}",
            "first epoch": sorted(orders[0]), "second epoch": sorted(orders[1]),
            "the two epochs": "in two orders" if differs[0] != differs[1] else "in one order",
            "the first epoch's order": "shuffled" if differs[0] != [{0, 1, 2}, {3, 4, 5}, {6}] else "as given",
        }  # fmt: skip

    def expected(**_: Any) -> Results:
        every = list(range(PAIRS))
        found: Results = {"pairs of each step": [3, 3, 1] * 2, "pairs of a call": "at most micro_size"}
        found |= {"first epoch": every, "second epoch": every}
        return found | {"the two epochs": "in two orders", "the first epoch's order": "shuffled"}

    given = {"pairs": PAIRS, "batch_size": 3, "micro_size": 2, "steps": 6, "seed": 5}
    return Case("property", "each pair once in an epoch", lambda: given, expected, TEXT.format(10), observe)


def seed_case() -> Case:
    """The order follows from the seed and the epoch alone."""

    def observe(adapters: Any, **_: Any) -> Results:
        first = str(order_of(adapters, 5, (3,)))
        others = {"the same seed, in parts": order_of(adapters, 5, (1, 2), noise=3), "seed 6": order_of(adapters, 6, (3,))}
        return {name: "the same order" if str(order) == first else "another order" for name, order in others.items()}

    same, other = "the same order", "another order"
    expected = lambda **_: {"the same seed, in parts": same, "seed 6": other}  # noqa: E731
    given = {"pairs": PAIRS, "batch_size": 3, "micro_size": 2, "steps": 3, "seed": 5}
    return Case("property", "the order follows from the seed", lambda: given, expected, TEXT.format(10), observe)


def whole_case(title: str, settings: Results, make: Callable[[list[Tensor]], torch.optim.Optimizer], micro_size: int = 4) -> Case:
    """All pairs in each step, so that the order does not matter. The reference is the model before its first step."""
    examples = pairs_of(SIZES, seed=11)

    def expected(**_: Any) -> Results:
        model = made(Attention)
        optimizer, found, tokens = make(list(model.parameters())), [], tokens_of(examples)
        reference = None if settings["loss"] in ("simpo", "orpo") else scores(model, examples)
        for _step in range(3):
            optimizer.zero_grad()
            loss = pair_losses(settings, sums(model, examples), reference, tokens).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return {"losses": torch.tensor(found)} | weights_of(model)

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(Attention)
        more = {"settings": dict(settings), "batch_size": len(examples), "micro_size": micro_size}
        run = started(adapters, model, make(list(model.parameters())), examples, **more)
        found = [float(loss) for steps in (1, 2) for loss in adapters.advance(run, steps)]
        return {"losses": torch.tensor(found)} | weights_of(model)

    given = {"pairs": len(examples), "batch_size": len(examples), "micro_size": micro_size, "steps": 3, **settings}
    return Case("oracle", title, lambda: given, expected, ALONE, observe, **NEAR)


def dropout_case() -> Case:
    """The reference is scored without dropout, the steps are made with it."""

    def observe(adapters: Any, **_: Any) -> Results:
        model = made(lambda: Attention(dropout=0.5)).train()
        run = started(adapters, model, Noted(model), marked())
        before = sorted({call.training for call in model.calls})
        model.calls.clear()
        adapters.advance(run, 2)
        return {"training mode when the reference is scored": before, "in the steps": sorted({call.training for call in model.calls})}

    expected = lambda **_: {"training mode when the reference is scored": [False], "in the steps": [True]}  # noqa: E731
    return Case("property", "dropout", lambda: {"pairs": PAIRS, "steps": 2}, expected, TEXT.format(10), observe)


def preferences(seed: int, count: int) -> Examples:
    """Answers of tokens below 10 are preferred to answers of tokens 10 to 19."""
    generator, found = torch.Generator().manual_seed(seed), []
    drawn = lambda low, size: torch.randint(low, low + 10, (size,), generator=generator).tolist()  # noqa: E731
    for number in range(count):
        prompt = drawn(19, 4)
        found.append(tuple(example(prompt, drawn(low, 3 + number % 3)) for low in (0, 10)))
    return found


def learns_case() -> Case:
    """24 pairs, and 24 others that were not seen: how many of them the model prefers in the right order, against the model as it was."""
    enough = Said("at least 22 of 24")

    def observe(adapters: Any, **_: Any) -> Results:
        model, held_out = made(Attention), preferences(2, 24)
        before = scores(model, held_out)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        run = started(adapters, model, optimizer, preferences(1, 24), batch_size=8, micro_size=8)
        losses = [float(loss) for loss in adapters.advance(run, 8)]
        moved = scores(model, held_out) - before
        right = int((moved[:, 0] > moved[:, 1]).sum())
        found = enough if right >= 22 else Said(f"{right} of 24")
        return {"held-out pairs in the right order": found, "the loss has fallen by half": losses[-1] < 0.5 * losses[0]}

    expected = lambda **_: {"held-out pairs in the right order": enough, "the loss has fallen by half": True}  # noqa: E731
    given = {"pairs": 24, "held out": 24, "steps": 8, "optimizer": "AdamW", **settings_of()}
    return Case("property", "it learns", lambda: given, expected, TEXT.format(10), observe)


TRAIN = (
    order_case(),
    seed_case(),
    whole_case("three steps, all pairs", settings_of(label_smoothing=0.1), lambda weights: torch.optim.SGD(weights, lr=0.2)),
    whole_case("AdamW", settings_of(beta=0.8), lambda weights: torch.optim.AdamW(weights, lr=0.02), micro_size=5),
    whole_case("IPO", settings_of("ipo"), lambda weights: torch.optim.SGD(weights, lr=0.2)),
    whole_case("SimPO", settings_of("simpo", 2.0, gamma=0.3), lambda weights: torch.optim.SGD(weights, lr=0.2)),
    dropout_case(),
    learns_case(),
)
