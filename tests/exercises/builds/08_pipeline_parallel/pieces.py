"""What the stages of build 08 share: the models, their micro-batches, schedules, and the oracle, the same model in one process.

The oracle is autograd on the whole model, in float64, one micro-batch after the other. tests/parity/test_08_build.py holds it against
torch.distributed.pipelining on processes. Ranks are threads. Tolerance: a pipeline adds the same numbers in another order, which moves
float64 by some 1e-15 of the largest summand; 1e-9 is far from that and far from any mistake.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.pipeline.schedules import Action, make_schedule

TOKENS, WIDTH, INNER = 13, 6, 10
TEXT = "the text of build.py: stage {}"
ONE_PROCESS = "the same model in one process, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}

Results = dict[str, Any]
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A block that mixes positions and features, and is another function in training: as dropout, with a mask that is always the same."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype).unsqueeze(-1)
        inner = torch.tanh(self.up(before))
        if self.training:
            inner = 1.5 * inner * (torch.arange(inner.shape[-1]) % 3 != 0)
        return x + self.down(inner)


class Model(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, blocks: int, tied: bool = False, width: int = WIDTH, inner: int = INNER):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.double()
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[-1] ** 0.5
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Digits(Model):
    """A model whose weights are all 1. With `digit_loss`, micro-batch i adds 10^i to the gradient of each."""

    def __init__(self, blocks: int):
        super().__init__(0, width=1)
        self.embedding, self.head = nn.Embedding(1, 1).double(), nn.Linear(1, 1, bias=False).double()
        self.blocks, self.norm = nn.ModuleList(Scale() for _ in range(blocks)), nn.Identity()
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def digit_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.squeeze(-1) * targets).sum()


def batches_of(shapes: Sequence[tuple[int, int]], ignored: float = 0.25, seed: int = 0) -> list[Batch]:
    """Micro-batches of ids and targets [B, S]. ignored: the share of targets that do not count."""
    generator, found = torch.Generator().manual_seed(seed), []
    for shape in shapes:
        ids, targets = (torch.randint(TOKENS, shape, generator=generator) for _ in range(2))
        targets[torch.rand(shape, generator=generator) < ignored] = -100
        found.append((ids, targets))
    return found


def even(microbatches: int, seed: int = 0) -> list[Batch]:
    """Micro-batches of one shape, in which every target counts."""
    return batches_of([(2, 3)] * microbatches, 0.0, seed)


def uneven(microbatches: int, seed: int = 0) -> list[Batch]:
    """Micro-batches of several shapes and numbers of tokens; the second has a target that counts in one row only, the third none."""
    found = batches_of([(2, 3), (3, 2), (1, 4), (2, 5), (1, 2), (2, 2)][:microbatches], seed=seed)
    found[1][1][1:] = -100
    for _, targets in found[2:3]:
        targets.fill_(-100)
    return found


def cut_of(blocks: int, stages: int) -> list[range]:
    """Contiguous blocks for each stage, of several sizes: the last stages have one block more."""
    ends = [blocks * (stage + 1) // stages for stage in range(stages)]
    return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def names_on(model: Model, cut: list[range], rank: int, ranks: int, tied: bool = False) -> list[str]:
    """The names of the weights that a rank holds, in the model's order."""
    numbers = {number for stage in range(rank, len(cut), ranks) for number in cut[stage]}
    wanted = [f"blocks.{number}." for number in sorted(numbers)]
    wanted += ["embedding."] * (rank == 0) + ["norm.", "embedding." if tied else "head."] * (rank == ranks - 1)
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(wanted))]


class Whole:
    """One process: the losses of micro-batches, the mean loss of a step, and its gradients."""

    def __init__(self, model: Model, batches: list[Batch], training: bool = True, loss: Callable = summed_loss):
        model.train(training)
        losses = [loss(model(ids), targets) for ids, targets in batches]
        self.losses = [each.detach() for each in losses]
        self.tokens = sum(int((targets != -100).sum()) for _, targets in batches)
        mean = torch.stack(losses).sum() / self.tokens
        self.mean, names = mean.detach(), [name for name, _ in model.named_parameters()]
        self.gradients = dict(zip(names, torch.autograd.grad(mean, list(model.parameters())), strict=True))

    @property
    def norm(self) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in self.gradients.values()]).norm()


def random_schedule(
    seed: int, ranks: int, microbatches: int, chunks: int = 1, same_order: bool = True, split: bool = False
) -> list[list[Action]]:
    """A valid schedule by chance: at each moment a rank that could do something does one of the things that it could do.

    same_order: on each way between two ranks, what is sent first is needed first.
    split: whether half of the backward passes are done as I and W.
    """
    chance, stages = random.Random(seed), ranks * chunks
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    parts = {(stage, number): split and chance.random() < 0.5 for stage in range(stages) for number in range(microbatches)}
    open_ = {("F", stage, number) for stage, number in parts} | {("I" if parts[at] else "B", *at) for at in parts}
    open_ |= {("W", *at) for at in parts if parts[at]}
    sent: dict[tuple, list[tuple]] = {}  # way -> what lies on it, in the order of sending

    def source(kind: str, stage: int, number: int) -> tuple | None:
        """The way on which an action's message comes, and the message; None where it needs none."""
        before = stage - 1 if kind == "F" else stage + 1
        return None if kind == "W" or not 0 <= before < stages else ((kind == "F", before % ranks, stage % ranks), (before, number))

    def ready(action: tuple) -> bool:
        kind, stage, number = action
        own = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
        if own and (own, stage, number) in open_:
            return False
        if (coming := source(*action)) is None:
            return True
        waiting = sent.get(coming[0], [])
        return coming[1] in (waiting[:1] if same_order else waiting)

    while open_:
        action = chance.choice(sorted(each for each in open_ if ready(each)))
        kind, stage, number = action
        open_.remove(action)
        if (coming := source(*action)) is not None:
            sent[coming[0]].remove(coming[1])
        lists[stage % ranks].append(Action(kind, number, stage // ranks))
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to < stages:
            sent.setdefault((kind == "F", stage % ranks, to % ranks), []).append((stage, number))
    return lists


def schedule_of(name: str | int, ranks: int, microbatches: int, chunks: int = 1, **options: bool) -> list[list[Action]]:
    """A schedule by its name, or by the seed of one by chance."""
    if isinstance(name, int):
        return random_schedule(name, ranks, microbatches, chunks, **options)
    return make_schedule(name, ranks, microbatches, chunks)


def actions(text: str) -> list[Action]:
    """F0 B0 F1.1 as actions: a number behind a dot is the chunk."""
    found = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        found.append(Action(word[0], int(microbatch), int(chunk or 0)))
    return found


def in_words(schedule: list[list[Action]]) -> list[str]:
    return [f"rank {rank}: {' '.join(str(action).replace(' of chunk ', '.') for action in own)}" for rank, own in enumerate(schedule)]


def on_pipelines(function: Callable[[Communicator, int], Any], ranks: int, pipelines: int = 1) -> list[list[Any]]:
    """function(group, which pipeline) on all ranks of one or several pipelines, for each pipeline by rank. Pipeline p of two that run at
    the same time has ranks p, p + 2, ... of the world."""

    def on_rank(world: Communicator) -> Any:
        if pipelines == 1:
            return function(world, 0)
        rows = [range(first, ranks * pipelines, pipelines) for first in range(pipelines)]
        return function(world.split("pp", rows), world.rank % pipelines)

    results = run_threads(on_rank, ranks * pipelines)
    return [results[first::pipelines] for first in range(pipelines)]
