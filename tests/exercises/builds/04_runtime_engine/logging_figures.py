"""Stage 2 of build 04: the figures of a log, reduced once."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared.course.checking import Case

from .pieces import NEAR, PLAIN, WITHIN, DoubleNet, Results, budget, warmup, words, world
from .stepping import NOWHERE, Line, given_engine, plain_loop, rows, summed


def means_case(title: str, log_every: int, parts: tuple[int, ...]) -> Case:
    """The figures of each log, against those of the plain loop."""

    def expected() -> Results:
        _, sums = plain_loop(parts[-1], warmup)
        found = {}
        for last in range(log_every, parts[-1] + 1, log_every):
            own = [sums[step] for step in range(last - log_every + 1, last + 1)]
            tokens = sum(each["tokens"] for each in own)
            found[f"log {last}"] = {name: sum(each[name] for each in own) / tokens for name in ("loss", "right", "size")}
            found[f"log {last}"] |= {"tokens": tokens, "learning_rate": own[-1]["rate"]}
        return found

    def observe(adapters: Any, **_: Any) -> Results:
        made = world(adapters, NOWHERE, log_every=log_every, model=DoubleNet)
        for steps in parts:
            adapters.run(made.engine, steps)
        return {f"log {step}": figures for step, figures in made.logs.items()}

    given = {"log_every": log_every, "run to": list(parts), "schedule": "warmup"}
    return Case("oracle", title, lambda: given, lambda **_: expected(), PLAIN, observe, **NEAR)


def tokens_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(3.0)], [rows(1.0, 1.0, 1.0)]], summed, log_every=2)
        made.model.weight.requires_grad_()
        made.optimizer.param_groups[0]["lr"] = 0.0
        adapters.run(made.engine, 2)
        return {"log": made.logs.get(2)}

    given = {"steps": [[[3.0]], [[1.0, 1.0, 1.0]]], "log_every": 2, "loss": "the sum of weight * x", "weight": 1.0, "learning rate": 0.0}
    expected = {"log": {"loss": 1.5, "largest": 1.5, "tokens": 4, "learning_rate": 0.0}}
    return words("worked example", "a mean over tokens, not of means", 2, given, expected, observe)


def precise_case(title: str, dtype: torch.dtype, first: float, rest: float, steps: int) -> Case:
    """A large sum, and small ones after it that its dtype cannot add."""

    def observe(adapters: Any) -> Results:
        def objective(model: nn.Module, x: Tensor) -> Any:
            value = x.sum().to(dtype)
            return (model.weight * 0).sum().float() + x.sum().float(), 1, {"seen": value}

        made = given_engine(adapters, Line(), [[rows(first if step == 0 else rest)] for step in range(steps)], objective, log_every=steps)
        adapters.run(made.engine, steps)
        log = made.logs.get(steps, {})
        return {"seen": log.get("seen"), "loss": log.get("loss")}

    mean = (first + rest * (steps - 1)) / steps
    given = {"sums": f"{dtype}".removeprefix("torch."), "values": f"{first:,.0f}, then {rest:g} in {steps - 1} steps", "log_every": steps}
    return words("property", title, 2, given, {"seen": mean, "loss": mean}, observe, **NEAR)


class Reads(TorchDispatchMode):
    """Counts numbers that are fetched from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads_case() -> Case:
    def observe(adapters: Any) -> Results:
        made = given_engine(adapters, Line(), [[rows(1.0), rows(2.0)]] * 8, summed, log_every=4)
        with Reads() as quiet:
            adapters.run(made.engine, 3)
        with Reads() as loud:
            adapters.run(made.engine, 8)
        return {"three steps without a log": budget(quiet.count, 0, "reads"), "five steps with two logs": budget(loud.count, 4, "reads")}

    given = {"log_every": 4, "means": "loss and one more", "micro-batches in a step": 2}
    return words(
        "budget",
        "numbers fetched from tensors",
        2,
        given,
        {"three steps without a log": WITHIN, "five steps with two logs": WITHIN},
        observe,
    )


class Node:
    """Something that lives as long as the graph that it is in."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, node: Node) -> Tensor:
        context.node = node
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def kept_graphs_case() -> Case:
    def observe(adapters: Any) -> Results:
        nodes, alive = [], []

        def marked(x: Tensor) -> Tensor:
            node = Node()
            nodes.append(weakref.ref(node))
            return Marked.apply(x, node)

        def objective(model: nn.Module, x: Tensor) -> Any:
            alive.append(sum(node() is not None for node in nodes))
            return marked(model(x).sum()), x.numel(), {"other": marked(model(x).sum())}

        made = given_engine(adapters, Line(), [[rows(1.0)]] * 8, objective, log_every=8)
        adapters.run(made.engine, 8)
        return {"graphs after eight steps": budget(max(alive), 4, "graphs that are alive")}

    given = {"log_every": 8, "steps": 8}
    return words("budget", "graphs of earlier steps", 2, given, {"graphs after eight steps": WITHIN}, observe)


METRICS = (
    tokens_case(),
    precise_case("a small loss after a large one", torch.float32, 2.0**24, 1.0, 9),
    precise_case("figures in bfloat16", torch.bfloat16, 256.0, 1.0, 5),
    means_case("a log in each step", 1, (4,)),
    means_case("logs of three steps, which a run begins and another ends", 3, (2, 5, 7)),
    reads_case(),
    kept_graphs_case(),
)
