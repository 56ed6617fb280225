"""Stage 1 of build 04: steps over micro-batches."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared.course.checking import Case

from .pieces import (
    PLAIN,
    TEXT,
    WITHIN,
    Data,
    DoubleNet,
    Listener,
    Results,
    World,
    adamw,
    budget,
    cosine,
    none,
    seed_all,
    tensors_of,
    totals,
    warmup,
    words,
    world,
)

NOWHERE = Path("/nowhere/at/all")  # in the stages that save nothing


class Line(nn.Module):
    """One weight. It has a `fill`, as Net has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Fixed:
    """Data whose steps are given: lists of micro-batches."""

    def __init__(self, steps: list[list[Any]], journal: list[str] | None = None):
        self.steps, self.journal = iter(steps), journal if journal is not None else []

    def __next__(self) -> list[Any]:
        self.journal.append("data")
        return next(self.steps)

    def state_dict(self) -> Results:
        return {}

    def load_state_dict(self, state: Results) -> None:
        pass


def given_engine(adapters: Any, model: nn.Module, steps: list[list[Any]], objective: Any, optimizer: Any = None, **settings: Any) -> World:
    """A run over data that is given."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    made = World(model, optimizer, None, Fixed(steps))
    made.journal = made.data.journal
    full = {"folder": NOWHERE, "log_every": 100, "save_every": 0, "keep": 2} | settings
    made.engine = adapters.make_engine(model, optimizer, None, made.data, objective, full, [Listener(made)])
    return made


def summed(model: nn.Module, x: Tensor) -> tuple[Tensor, int, Results]:
    return model(x).sum(), x.numel(), {"largest": x.sum()}


def rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Stage 1: steps


def example_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(3.0), rows(1.0, 1.0, 1.0)]], summed)
        return {"returned": adapters.run(made.engine, 1), "weight": made.model.weight.item(), "grad": made.model.weight.grad.item()}

    given = {"micro-batches": [[3.0], [1.0, 1.0, 1.0]], "loss": "the sum of weight * x", "weight": 1.0, "learning rate": 1.0}
    expected = {"returned": 1, "weight": -0.5, "grad": 1.5}
    return words("worked example", "1 and 3 tokens: (3 + 3) / 4", 1, given, expected, observe)


def plain_loop(steps: int, schedule: Any, seed: int = 0) -> tuple[World, dict[int, Results]]:
    """The oracle: the steps, and the figures of each step."""
    model = DoubleNet()
    made = World(model, adamw(model), None, Data([]))
    made.schedule = schedule(made.optimizer)
    seed_all(seed)
    sums = {}
    for step in range(1, steps + 1):
        model.zero_grad()
        found = [totals(model, batch) for batch in next(made.data)]
        count = sum(tokens for _, tokens, _ in found)
        (torch.stack([loss for loss, _, _ in found]).sum() / count).backward()
        sums[step] = {"loss": sum(loss.item() for loss, _, _ in found), "tokens": count, "rate": made.optimizer.param_groups[0]["lr"]}
        sums[step] |= {name: sum(each[name].item() for _, _, each in found) for name in ("right", "size")}
        made.optimizer.step()
        if made.schedule:
            made.schedule.step()
    return made, sums


def oracle_case(title: str, schedule: Any, parts: tuple[int, ...]) -> Case:
    def expected(**_: Any) -> Results:
        made, _ = plain_loop(parts[-1], schedule)
        return tensors_of(made.model) | {"rates": [group["lr"] for group in made.optimizer.param_groups], "steps": list(parts)}

    def observe(adapters: Any, **_: Any) -> Results:
        made = world(adapters, NOWHERE, schedule=schedule, model=DoubleNet)
        done = [adapters.run(made.engine, steps) for steps in parts]
        return tensors_of(made.model) | {"rates": [group["lr"] for group in made.optimizer.param_groups], "steps": done}

    given = {"optimizer": "AdamW, two groups", "schedule": schedule.__name__, "run to": list(parts)}
    return Case("oracle", title, lambda: given, expected, f"{PLAIN}; {TEXT.format(1)}", observe, rtol=1e-8, atol=1e-10)


class NotedSGD(torch.optim.SGD):
    def __init__(self, parameters: Any, journal: list[str]):
        super().__init__(parameters, lr=0.1)
        self.journal = journal

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.journal.append("optimizer")


def order_case() -> Case:
    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        journal: list[str] | None = None

        def step(self, epoch: Any = None) -> None:
            super().step()
            if self.journal is not None:
                self.journal.append("schedule")

    def observe(adapters: Any) -> Results:
        model, journal = Line(), []

        def objective(model: nn.Module, x: Tensor) -> Any:
            journal.append("objective")
            return summed(model, x)

        optimizer = NotedSGD(model.parameters(), journal)
        schedule = Schedule(optimizer, lambda step: 1.0)
        schedule.journal = journal
        made = World(model, optimizer, schedule, Fixed([[rows(1.0), rows(2.0)]] * 3, journal), journal)
        settings = {"folder": NOWHERE, "log_every": 2, "save_every": 0, "keep": 1}
        callbacks = [Listener(made, "first: "), object(), Listener(made, "second: ")]
        engine = adapters.make_engine(model, optimizer, schedule, made.data, objective, settings, callbacks)
        before = list(journal)
        adapters.run(engine, 1)
        one = list(journal)
        adapters.run(engine, 2)
        adapters.run(engine, 2)
        return {"make_engine": before, "run to 1": one, "run to 2, twice": journal[len(one) :]}

    step = ["data", "objective", "objective", "optimizer", "schedule"]
    both = lambda what: [f"first: {what}", f"second: {what}"]  # noqa: E731
    expected = {"make_engine": [], "run to 1": [*step, *both("step 1")], "run to 2, twice": [*step, *both("step 2"), *both("log 2")]}
    given = {"micro-batches in a step": 2, "log_every": 2, "callbacks": "first, one without methods, second"}
    return words("property", "what is called, in which order", 1, given, expected, observe)


def stale_case() -> Case:
    """Gradients that were there before, and a micro-batch without tokens beside others."""

    def observe(adapters: Any) -> Results:
        model = Line()
        model.weight.grad = torch.full((1,), 100.0, dtype=torch.float64)
        made = given_engine(adapters, model, [[rows(), rows(2.0)], [rows(4.0, 2.0), rows()]], summed)
        adapters.run(made.engine, 2)
        return {"weight": model.weight.item()}

    given = {"grad before": 100.0, "steps": [[[], [2.0]], [[4.0, 2.0], []]], "learning rate": 1.0}
    return words("property", "an old gradient, and micro-batches without tokens", 1, given, {"weight": -4.0}, observe)


def raising_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(1.0)]] * 3, summed)
        place = made.data.steps
        made.data.steps = iter([next(place)])  # it ends after one step: StopIteration is the data's own error
        try:
            return {"run": f"returned {adapters.run(made.engine, 3)}"}
        except Exception as error:
            return {"run": type(error).__name__, "steps heard of": [line for line in made.journal if line != "data"]}

    class_name = "StopIteration"
    return words(
        "property", "an exception of data", 1, {"data": "raises in step 2"}, {"run": class_name, "steps heard of": ["step 1"]}, observe
    )


def graphs_case() -> Case:
    """What a micro-batch's graph has saved is gone when the next one begins, also what hangs on a figure."""

    def observe(adapters: Any) -> Results:
        alive, saved = [], []

        def objective(model: nn.Module, x: Tensor) -> Any:
            alive.append(sum(not storage.expired() for storage in saved))
            out = (model.weight * x).exp()
            other = (model.weight * x).exp()
            saved.extend((StorageWeakRef(out.untyped_storage()), StorageWeakRef(other.untyped_storage())))
            return out.sum(), x.numel(), {"other": other.sum()}

        made = given_engine(adapters, Line(), [[rows(0.1, 0.2, i) for i in range(3)]] * 2, objective)
        adapters.run(made.engine, 2)
        return {"saved tensors of earlier micro-batches": budget(max(alive), 0, "saved tensors of earlier graphs")}

    expected = {"saved tensors of earlier micro-batches": WITHIN}
    return words("budget", "one graph at a time", 1, {"micro-batches in a step": 3, "steps": 2}, expected, observe)


STEPS = (
    example_case(),
    order_case(),
    stale_case(),
    raising_case(),
    oracle_case("AdamW with a warm-up, in two parts", warmup, (2, 6)),
    oracle_case("a schedule that multiplies the rate", cosine, (5,)),
    oracle_case("no schedule", none, (3,)),
    graphs_case(),
)
