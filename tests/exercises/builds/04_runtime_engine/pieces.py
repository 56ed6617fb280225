"""What the stages of build 04 share: a model with every kind of tensor, data and objective that note what is asked of them, whole runs.

The oracle of steps and figures is a plain loop of PyTorch, in float64 to 1e-9: sums in another order differ by some 1e-15. What was resumed
is compared with a run of the same engine that nobody interrupted, bit for bit.
"""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn

from shared.course.assignments import builds
from shared.course.checking import Case
from shared.course.comparing import Said

TEXT = "the text of build.py: stage {}"
PLAIN = "a plain loop of PyTorch, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-12}
WITHIN, NOTHING = Said("within the budget"), Said("nothing differs")

Results = dict[str, Any]


class Net(nn.Module):
    """Parameters of two dtypes, frozen, tied, a scalar, an empty one and one that is not contiguous; buffers; dropout."""

    def __init__(self, dropout: float = 0.25):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(4)
        self.drop, self.second = nn.Dropout(dropout), nn.Linear(6, 3)
        self.tied = self.second.weight
        self.frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))
        self.double()
        self.short = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64).T)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.fill(1)

    def fill(self, seed: int) -> None:
        """Other weights and buffers, always the same for a seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) > 0.5 if tensor.dtype == torch.bool else
                             torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 3 + 0.1)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(self.norm(x)) * self.scale))
        return hidden @ self.tied.T + self.second.bias + self.short.double() + x @ self.turned + self.frozen.sum() + self.empty.sum()


class DoubleNet(Net):
    """What is trained is in float64: in bfloat16 another order of the same sums is another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.short.requires_grad_(False)


class Data:
    """Micro-batches of many sizes that follow from the position alone. Loading a state draws random numbers and keeps what it is given."""

    def __init__(self, journal: list[str]):
        self.state, self.journal = {"position": 0, "files": [{"name": "a", "open": True, "rest": None, "share": 0.1}]}, journal

    def __next__(self) -> list[dict[str, Tensor]]:
        self.journal.append("data")
        self.state["position"] += 1
        position = self.state["position"]
        generator = torch.Generator().manual_seed(position)
        sizes = [(2, 5), (7, 3, 2), (4,)][position % 3]
        drawn = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        return [{"x": drawn(size, 4), "y": drawn(size, 3)} for size in sizes]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        torch.rand(3), random.random(), numpy.random.rand()


def totals(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Squared errors, and how many signs are right: a count in int64. Each of the three generators is drawn from."""
    noise = 0.01 * (random.random() + numpy.random.rand() + torch.rand((), dtype=torch.float64))
    out = model(batch["x"] + noise)
    return (out - batch["y"]).square().sum(), len(out), {"right": (out.sign() == batch["y"].sign()).sum(), "size": out.abs().sum()}


class Listener:
    """A callback that notes in the journal and the logs what it hears."""

    def __init__(self, world: "World", name: str = ""):
        self.world, self.name = world, name

    def on_step(self, step: int) -> None:
        self.world.journal.append(f"{self.name}step {step}")

    def on_log(self, step: int, figures: dict[str, float]) -> None:
        self.world.journal.append(f"{self.name}log {step}")
        self.world.logs[step] = dict(figures)

    def on_save(self, step: int) -> None:
        self.world.journal.append(f"{self.name}save {step}")


@dataclass
class World:
    """A run and everything that it is made of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    data: Data
    journal: list[str] = field(default_factory=list)
    logs: dict[int, Results] = field(default_factory=dict)
    engine: Any = None


def adamw(model: nn.Module, backwards: bool = False) -> torch.optim.Optimizer:
    """Two groups. backwards: the parameters in each in the other order."""
    named = dict(model.named_parameters())
    first = [name for name in named if name.startswith(("first", "short", "turned"))]
    groups = [first, [name for name in named if name not in first and name != "frozen"]]
    groups = [[named[name] for name in (reversed(group) if backwards else group)] for group in groups]
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "lr": 0.03}], lr=0.01)


def momentum(model: nn.Module, backwards: bool = False) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD(parameters[::-1] if backwards else parameters, lr=0.01, momentum=0.9)


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    """Each rate follows from the one before it in the optimizer's groups."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


def none(optimizer: torch.optim.Optimizer) -> None:
    return None


def settings_of(folder: Path, **changes: Any) -> Results:
    return {"folder": folder, "log_every": 3, "save_every": 0, "keep": 2} | changes


def world(
    adapters: Any,
    folder: Path,
    *,
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable = adamw,
    schedule: Callable = warmup,
    objective: Callable = totals,
    callbacks: Callable[["World"], list[Any]] = lambda made: [Listener(made)],
    dirty: int = 0,
    **settings: Any,
) -> World:
    """A run before its first step. dirty: a number that makes other weights, states and random numbers, and the optimizer backwards."""
    net, journal = model(), []
    made = World(net, optimizer(net, backwards=True) if dirty else optimizer(net), None, Data(journal), journal)
    made.schedule = schedule(made.optimizer)
    if dirty:
        net.fill(100 + dirty)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
        made.optimizer.step()
        made.data.state["position"] = 50 + dirty
    seed_all(dirty)
    given = settings_of(folder, **settings)
    made.engine = adapters.make_engine(net, made.optimizer, made.schedule, made.data, objective, given, callbacks(made))
    return made


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def generators() -> Results:
    name, keys, *rest = numpy.random.get_state()
    return {"PyTorch's generator": torch.get_rng_state(), "Python's random": random.getstate(), "NumPy's generator": [keys.tolist(), rest]}


def tensors_of(model: nn.Module) -> Results:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def state_of(made: World) -> Results:
    """Everything that a later step depends on, by name, as copies."""
    names = {parameter: name for name, parameter in made.model.named_parameters()}
    found: Results = {f"model: {name}": tensor for name, tensor in tensors_of(made.model).items()}
    for parameter, state in made.optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer: {key}, {names[parameter]}"] = value.detach().clone() if isinstance(value, Tensor) else value
    for number, group in enumerate(made.optimizer.param_groups):
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
        found |= {f"optimizer's options: {key}, group {number}": value for key, value in options.items()}
    schedule = made.schedule.state_dict() if made.schedule else {}
    found |= {f"schedule: {key}": value for key, value in schedule.items() if key in ("last_epoch", "_last_lr", "base_lrs")}
    return found | {f"data: {key}": repr(value) for key, value in made.data.state.items()} | generators()


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    return type(left) is type(right) and left == right


def apart(whole: Results, found: Results) -> str:
    """The kinds of things that differ, and the first of them."""
    names = [name for name in whole | found if not equal(whole.get(name), found.get(name))]
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    return NOTHING if not names else Said(f"{', '.join(kinds)} ({len(names)} in all, as {names[0]})")


def words(rung: str, title: str, stage: int, given: Results, expected: Results, observe: Callable[..., Results], **more: Any) -> Case:
    """A case whose expected results are known in advance."""
    source = more.pop("source", TEXT.format(stage))
    return Case(rung, title, lambda: given, lambda **_: expected, source, lambda adapters, **_: observe(adapters), **more)


def budget(value: int, limit: int, unit: str) -> Said:
    return WITHIN if value <= limit else Said(f"{value:,} {unit}, and the budget is {limit:,}")


STAGES = ("steps", "metrics", "evaluate", "save", "kill", "power", "resume", "signal", "bad_input")


@cache
def stage_of(module: str) -> str:
    """Where the check must stop a wrong build, by the name of its module; nothing for any other build."""
    return {f"course_04_runtime_engine_{name}": wrong.stage for name, wrong in builds()["04.build"].wrong_builds().items()}.get(module, "")


def remembered(case: Case, name: str) -> Case:
    """A case that runs each wrong build once, and none of an earlier stage, which an answer at this stage has passed. The diagnosis
    compares an answer with every wrong build, and here a case forks processes."""
    found: WeakKeyDictionary[Any, Results] = WeakKeyDictionary()

    def observe(adapters: Any, **given: Any) -> Results:
        stage = stage_of(adapters.module.__name__)
        if stage and STAGES.index(stage) < STAGES.index(name):
            return {"of an earlier stage": True}
        if adapters.module in found:
            return found[adapters.module]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with torch.enable_grad():  # an answer that turns gradients off, or keeps signals, does so no longer than its case
                result = case.observe(adapters, **given)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if stage:
            found[adapters.module] = result
        return result

    return replace(case, observe=observe)


def remembering(name: str, cases: tuple[Case, ...]) -> list[Case]:
    return [remembered(case, name) for case in cases]
