"""A small training run for the check of 04.restore, in which everything that a snapshot holds changes the next step.

Its model has a tied head, dropout and a buffer that follows the stream; its loader counts; its temperature falls and draws a
number when it is loaded; and its steps draw from Python's and NumPy's generators too.
"""

import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.engine.checkpoint.snapshot import Snapshot, take_snapshot

VOCAB, WIDTH = 11, 5


class Model(nn.Module):
    """Ids to logits over the same ids. `center` is a running mean of the stream, subtracted from it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("center", torch.zeros(WIDTH))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.mix(self.tokens(ids)).tanh())
        self.center.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
        return self.head(x - self.center)


class Loader:
    """Batch n depends on n alone. Keeps the state that it was given, and writes into it."""

    def __init__(self):
        self.state = {"sample": 0, "step": 0, "epoch": {"batches": 0}}

    def batch(self) -> Tensor:
        self.state["sample"] += 13
        self.state["step"] += 1
        self.state["epoch"]["batches"] += 1
        return torch.randint(VOCAB, (13,), generator=torch.Generator().manual_seed(self.state["sample"]))

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Temperature:
    """Divides the logits, and falls from step to step. Loading it draws a random number, as building a model may."""

    def __init__(self):
        self.value = 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(()), random.random(), np.random.rand()
        self.value = state["value"]


def adamw(model: nn.Module, lr: float) -> Optimizer:
    """Weight decay on the matrices only, so two groups."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": lr / 2}], lr=lr)


def regrouped(model: nn.Module, lr: float) -> Optimizer:
    """The same groups in the other order, their parameters in the other order too."""
    optimizer = adamw(model, lr)
    groups = [{**group, "params": group["params"][::-1]} for group in optimizer.param_groups[::-1]]
    return torch.optim.AdamW(groups, lr=lr)


def momentum(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class Run:
    """A run from its first step. The seed moves all generators and makes other weights."""

    def __init__(self, seed: int, lr: float = 0.03, make_optimizer: Callable = adamw):
        torch.default_generator.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        self.model = Model()
        self.optimizer = make_optimizer(self.model, lr)
        self.parts = {"loader": Loader(), "temperature": Temperature()}

    def steps(self, count: int) -> "Run":
        take_steps(count, self.model, self.optimizer, self.parts)
        return self

    def given(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "parts": self.parts}


def take_steps(count: int, model: nn.Module, optimizer: Optimizer, parts: dict) -> list[float]:
    """The losses of so many steps."""
    losses = []
    for _ in range(count):
        ids = parts["loader"].batch()
        optimizer.zero_grad()
        logits = model(ids) / parts["temperature"].value + random.random() * torch.from_numpy(np.random.rand(VOCAB))
        loss = F.cross_entropy(logits, ids)
        loss.backward()
        optimizer.step()
        parts["temperature"].value *= 0.9
        losses.append(loss.item())
    return losses


def drawn() -> dict[str, float]:
    """The next number of each generator."""
    return {"torch": torch.rand((), dtype=torch.float64).item(), "python": random.random(), "numpy": float(np.random.rand())}


@functools.cache
def after_two_steps(make_optimizer: Callable = adamw) -> Snapshot:
    """Of the run with seed 3. One for all cases: take `own` copies."""
    return own(take_snapshot(2, **Run(3, make_optimizer=make_optimizer).steps(2).given()))


def own(snapshot: Snapshot) -> Snapshot:
    """A snapshot that shares nothing with a run. The generators' states are copies already."""
    parts = {name: copy.deepcopy(getattr(snapshot, name)) for name in ("weights", "optimizer", "parts")}
    return dataclasses.replace(snapshot, **parts)


def everything(model: nn.Module, optimizer: Optimizer, parts: dict) -> dict[str, Any]:
    """Copies of all that a run is made of; the generators are moved."""
    return contents_of(take_snapshot(0, model, optimizer, parts)) | {"next random numbers": drawn()}


def contents_of(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as named results, without its generators."""
    settings = {name: (group["lr"], group["weight_decay"]) for group in snapshot.optimizer.groups for name in group["names"]}
    return copy.deepcopy(
        {"weights": snapshot.weights, "optimizer": snapshot.optimizer.tensors, "lr and weight decay": settings, "parts": snapshot.parts}
    )
