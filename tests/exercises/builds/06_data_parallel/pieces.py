"""What the stages of build 06 share: the models, their micro-batches, optimizers, and the oracle, the same model in one process.

The oracle is autograd on the whole model, in float64, on all micro-batches of all ranks. Ranks are threads. Tolerance: ranks add the same
numbers in another order, which moves float64 by some 1e-15 of the largest summand; 1e-9 is far from that and from any mistake.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.comparing import Said
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.threads import run_threads

TOKENS = 13
TEXT = "the text of build.py: stage {}"
ONE_PROCESS = "the same model in one process, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}
BYTES = 8  # of a number in float64
NO_GRADIENT = Said("None")

Results = dict[str, Any]
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A unit. `long` is used by sequences of more than three tokens alone, `spare` by none; `down` is stored by columns."""

    def __init__(self, width: int, inner: int, dropout: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.long, self.spare, self.dropout = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(3)), nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype).unsqueeze(-1)
        inner = self.dropout(torch.tanh(self.up(before)))
        out = x + self.scale * self.down(inner)
        return out + self.long if x.shape[1] > 3 else out


class Model(nn.Module):
    """Embedding, blocks, norm and head. `far` is used by sequences of more than four tokens alone. seed: of its weights and buffers.

    backwards: the blocks run from the last to the first where the first id is odd. notes: what `note` returns whenever the gradient of a
    block's output is complete.
    """

    def __init__(
        self, blocks: int = 2, seed: int = 0, width: int = 6, inner: int = 10, tied: bool = False, frozen: Sequence[str] = (),
        dropout: float = 0.0, backwards: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.embedding, self.far = nn.Embedding(TOKENS, width), nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, inner, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("shift", torch.zeros(width))
        self.double()
        generator = torch.Generator().manual_seed(100 + seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[-1] ** 0.5
        for block in self.blocks:
            block.down.weight.data = block.down.weight.data.T.contiguous().T
        self.counts += seed
        self.shift += seed / 8
        if tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name not in frozen
        self.backwards, self.note, self.notes = backwards, None, []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.shift
        if ids.shape[1] > 4:
            x = x + self.far
        for block in reversed(self.blocks) if self.backwards and ids[0, 0] % 2 else self.blocks:
            x = block(x)
            if self.note and x.requires_grad:
                x.register_hook(lambda gradient: self.notes.append(self.note()))
        return self.head(self.norm(x))


class Digits(nn.Module):
    """A model of weights of 1. With `digit_loss`, a micro-batch with target 10^i adds 10^i to the gradient of each."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.ones(*ids.shape, 1, dtype=torch.float64)
        for weight in self.weights:
            logits = logits * weight
        return logits


def digit_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.squeeze(-1) * targets).sum()


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def units_of(model: Model) -> list[str]:
    return [f"blocks.{number}" for number in range(len(model.blocks))]


def batches_of(shapes: Sequence[tuple[int, int]], seed: int, ignored: float = 0.3, first: int | None = None) -> list[Batch]:
    """Micro-batches of one rank. ignored: the share of targets that do not count. first: the first id of each."""
    generator, found = torch.Generator().manual_seed(seed), []
    for shape in shapes:
        ids, targets = (torch.randint(TOKENS, shape, generator=generator) for _ in range(2))
        targets[torch.rand(shape, generator=generator) < ignored] = -100
        if first is not None:
            ids[0, 0] = first
        found.append((ids, targets))
    return found


EVEN, UNEVEN = ((2, 3), (2, 3), (2, 3), (2, 3)), ((2, 5), (1, 2), (3, 4), (1, 3))


def one_each(ranks: int, even: bool = False, seed: int = 0) -> list[list[Batch]]:
    """One micro-batch for each rank. Unless `even`, sizes differ, and rank 1 has no target that counts."""
    shapes, found = EVEN if even else UNEVEN, []
    for rank in range(ranks):
        found.append(batches_of([shapes[rank]], 10 * seed + rank, 0.0 if even else 0.3))
        if rank == 1 and not even:
            found[-1][0][1].fill_(-100)
    return found


def several(ranks: int, numbers: Sequence[int], seed: int = 0) -> list[list[Batch]]:
    """numbers[rank] micro-batches for each rank, of several sizes; the first of rank 0 has long sequences and the last has short ones."""
    return [batches_of([UNEVEN[(rank + 2 * i) % 4] for i in range(numbers[rank])], 50 + 10 * seed + rank) for rank in range(ranks)]


def adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors or [torch.zeros(0)], lr=0.05, weight_decay=0.1)


def momentum(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors or [torch.zeros(0)], lr=0.3, momentum=0.9, weight_decay=0.1)


class Alone:
    """One process: a model and its optimizer, trained on the micro-batches of all ranks."""

    def __init__(self, model: nn.Module, optimizer: Callable = adamw, loss: Callable = summed_loss):
        self.model, self.loss = model, loss
        self.named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.optimizer = optimizer(list(self.named.values()))

    def backward(self, batches: list[list[Batch]]) -> Tensor:
        self.optimizer.zero_grad()
        every = [batch for own in batches for batch in own]
        tokens = sum(int((targets != -100).sum()) for _, targets in every)
        mean = torch.stack([self.loss(self.model(ids), targets) for ids, targets in every]).sum() / tokens
        mean.backward()
        self.gradients = {name: None if weight.grad is None else weight.grad.clone() for name, weight in self.named.items()}
        self.norm = torch.cat([gradient.flatten() for gradient in self.gradients.values() if gradient is not None]).norm()
        return mean.detach()

    def update(self, max_norm: float | None = None) -> Tensor:
        if max_norm is not None and self.norm > max_norm:
            for weight in self.named.values():
                if weight.grad is not None:
                    weight.grad *= max_norm / self.norm
        self.optimizer.step()
        return self.norm

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}


def said(gradient: Tensor | None) -> Tensor | Said:
    return gradient.detach().clone() if isinstance(gradient, Tensor) else NO_GRADIENT


def make(adapters: Any, kind: str, model: nn.Module, group: Communicator, optimizer: Callable = adamw, bucket_bytes: int = 700) -> Any:
    """One of the three kinds, or "recompute"."""
    if kind in ("replica", "zero"):
        return getattr(adapters, f"make_{kind}")(model, group, optimizer, bucket_bytes)
    return adapters.make_sharded(model, units_of(model), group, optimizer, kind == "recompute")


def on_groups(function: Callable[[Communicator, int], Any], ranks: int, groups: int = 1) -> list[list[Any]]:
    """function(group, which group) on all ranks of one or several groups, for each group by rank. Group g of two that run at the same time
    has ranks g, g + 2, ... of the world."""

    def on_rank(world: Communicator) -> Any:
        if groups == 1:
            return function(world, 0)
        rows = [range(first, ranks * groups, groups) for first in range(groups)]
        return function(world.split("dp", rows), world.rank % groups)

    results = run_threads(on_rank, ranks * groups)
    return [results[first::groups] for first in range(groups)]


def described(batches: list[list[Batch]]) -> list[str]:
    return [f"rank {rank}: {[list(ids.shape) for ids, _ in own]}" for rank, own in enumerate(batches)]
