"""Stage 3 of build 04: figures of other batches, and a training that does not notice."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from shared.course.checking import Case

from .logging_figures import Reads
from .pieces import (
    NEAR,
    NOTHING,
    PLAIN,
    WITHIN,
    Data,
    Listener,
    Net,
    Results,
    apart,
    budget,
    equal,
    generators,
    seed_all,
    state_of,
    totals,
    words,
    world,
)
from .stepping import NOWHERE, Line, given_engine, rows, summed


def held_out(steps: int = 2) -> list[dict[str, Tensor]]:
    data = Data([])
    data.state["position"] = 900
    return [batch for _ in range(steps) for batch in next(data)]


def figures_case() -> Case:
    def expected(**_: Any) -> Results:
        model = Net().eval()
        seed_all(3)
        found = [totals(model, batch) for batch in held_out()]
        count = sum(tokens for _, tokens, _ in found)
        sums = {"loss": sum(loss.item() for loss, _, _ in found)}
        sums |= {name: sum(each[name].item() for _, _, each in found) for name in ("right", "size")}
        return {name: value / count for name, value in sums.items()} | {"tokens": count}

    def observe(adapters: Any, **_: Any) -> Results:
        made = world(adapters, NOWHERE)
        seed_all(3)
        return dict(adapters.evaluate(made.engine, held_out()))

    given = {"micro-batches": [len(batch["x"]) for batch in held_out()], "dropout": 0.25}
    return Case("oracle", "figures of five micro-batches", lambda: given, expected, PLAIN, observe, **NEAR)


def modes_case() -> Case:
    """The mode and gradient mode of each call, and what is left afterwards. A module was frozen in evaluation mode."""

    def observe(adapters: Any) -> Results:
        seen = []

        def objective(model: nn.Module, batch: Results) -> Any:
            seen.append([model.training, model.norm.training, torch.is_grad_enabled()])
            return totals(model, batch)

        made = world(adapters, NOWHERE, objective=objective)
        made.model.norm.eval()
        adapters.evaluate(made.engine, held_out(1))
        modes = [name or "the model" for name, module in made.model.named_modules() if module.training]
        return {
            "modes in the calls": sorted(set(map(tuple, seen))),
            "in training mode afterwards": modes,
            "gradients": torch.is_grad_enabled(),
        }

    modes = ["the model", "first", "drop", "second"]
    expected = {"modes in the calls": [(False, False, False)], "in training mode afterwards": modes, "gradients": True}
    return words("property", "modes, one module frozen in evaluation mode", 3, {"norm": "norm.eval() was called"}, expected, observe)


def failing_case() -> Case:
    def observe(adapters: Any) -> Results:
        calls = []

        def objective(model: nn.Module, batch: Results) -> Any:
            calls.append(0)
            found = totals(model, batch)
            if len(calls) == 2:
                raise RuntimeError("a bad file")
            return found

        made = world(adapters, NOWHERE, objective=objective)
        seed_all(4)
        before = state_of(made)
        try:
            adapters.evaluate(made.engine, held_out())
            raised = "nothing"
        except RuntimeError as error:
            raised = str(error)
        return {
            "raised": raised,
            "state": apart(before, state_of(made)),
            "training mode": made.model.training,
            "gradients": torch.is_grad_enabled(),
        }

    expected = {"raised": "a bad file", "state": NOTHING, "training mode": True, "gradients": True}
    return words("property", "the objective raises in its second call", 3, {"micro-batches": 5}, expected, observe)


class Evaluating(Listener):
    def on_step(self, step: int) -> None:
        super().on_step(step)
        self.figures = self.world.evaluate()


class Remembering(Net):
    """It keeps a table that it makes when it is first called, as positions are kept."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = self.tied.detach() * 0 + 1
        return super().forward(x) * (self.table * self.tied).sum()


TOKENS = 12 + 4 + 7  # of the first three steps of Data


def unnoticed_case(title: str, model: type[nn.Module]) -> Case:
    """A training that is evaluated before it and after each step, and one that is not: everything is equal bit for bit."""

    def trained(adapters: Any, evaluating: bool) -> Results:
        kind = Evaluating if evaluating else Listener
        made = world(adapters, NOWHERE, model=model, callbacks=lambda made: [kind(made)])
        made.evaluate = lambda: adapters.evaluate(made.engine, held_out(1))
        if evaluating:
            made.evaluate()
        adapters.run(made.engine, 5)
        gradients = {f"grad: {name}": each.grad for name, each in made.model.named_parameters() if each.grad is not None}
        return state_of(made) | gradients | {f"logs: {step}": repr(sorted(figures.items())) for step, figures in made.logs.items()}

    def observe(adapters: Any) -> Results:
        evaluated = trained(adapters, True)
        tokens = re.search(r"'tokens', (\d+)", evaluated.get("logs: 3", ""))
        return {
            "with evaluations and without": apart(trained(adapters, False), evaluated),
            "tokens in the log of step 3": int(tokens[1]) if tokens else None,
        }

    given = {"steps": 5, "log_every": 3, "evaluated": "before the first step, and in on_step of each"}
    return words("property", title, 3, given, {"with evaluations and without": NOTHING, "tokens in the log of step 3": TOKENS}, observe)


def gradients_case() -> Case:
    """Gradients that are there stay, and none are made."""

    def observe(adapters: Any) -> Results:
        made = world(adapters, NOWHERE)
        made.model.scale.grad = torch.tensor(7.0, dtype=torch.float64)
        adapters.evaluate(made.engine, held_out(1))
        return {name: each.grad.item() for name, each in made.model.named_parameters() if each.grad is not None}

    return words("property", "gradients", 3, {"grad of scale": 7.0}, {"scale": 7.0}, observe)


def streams_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = world(adapters, NOWHERE)
        seed_all(8)
        before = generators()
        adapters.evaluate(made.engine, held_out(1))
        return {name: "where it was" if equal(state, before[name]) else "moved" for name, state in generators().items()}

    expected = dict.fromkeys(("PyTorch's generator", "Python's random", "NumPy's generator"), "where it was")
    return words("property", "the objective draws random numbers", 3, {"micro-batches": 2}, expected, observe)


def reads_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(1.0)]], summed)
        with Reads() as reads:
            adapters.evaluate(made.engine, [rows(1.0), rows(2.0), rows(3.0)])
        return {"numbers fetched": budget(reads.count, 2, "reads")}

    return words(
        "budget",
        "numbers fetched from tensors",
        3,
        {"means": "loss and one more", "micro-batches": 3},
        {"numbers fetched": WITHIN},
        observe,
    )


EVALUATE = (
    figures_case(),
    modes_case(),
    gradients_case(),
    streams_case(),
    failing_case(),
    unnoticed_case("a training does not notice it", Net),
    unnoticed_case("a model that keeps what it computed first", Remembering),
    reads_case(),
)
