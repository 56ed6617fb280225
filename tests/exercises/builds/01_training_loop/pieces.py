"""What the stages of build 01 share: models that record their calls, texts, and the oracle: PyTorch's own losses on everything at once.

Tolerance: batches of other sizes add float64 numbers up in another order, which moves a sum by some 1e-15 of its largest summand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared.course.comparing import Said

TEXT = "the text of build.py: stage {}"
NEAR = {"rtol": 1e-9, "atol": 1e-9}
WITHIN = "within the budget"
IGNORED = -100

Results = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def text_of(size: int, seed: int = 0, least: int = 0) -> Tensor:
    """Random bytes from `least` to 255."""
    return torch.randint(least, 256, (size,), generator=generator(seed)).to(torch.uint8)


# Models


@dataclass
class Call:
    """One call of a model: its input, the mode, whether gradients are recorded, and how many logits and hidden values of earlier
    calls there still are: a graph holds hidden values for its backward pass."""

    ids: Tensor
    training: bool
    gradients: bool
    alive: int


class Recorded(nn.Module):
    """A causal model that notes its calls. fails: from which call on it raises."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.storages: list[StorageWeakRef] = []
        self.fails = fails

    def forward(self, ids: Tensor) -> Tensor:
        alive = sum(not storage.expired() for storage in self.storages)
        self.calls.append(Call(ids.clone(), self.training, torch.is_grad_enabled(), alive))
        if self.fails is not None and len(self.calls) > self.fails:
            raise RuntimeError("the model fails")
        logits = self.logits(ids)
        return self.noted(logits)

    def noted(self, tensor: Tensor) -> Tensor:
        """The tensor; whether it is still there is asked at later calls."""
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def logits(self, ids: Tensor) -> Tensor:
        raise NotImplementedError(type(self).__name__)


class Averages(Recorded):
    """At each place the mean of the embeddings so far, so that all earlier ids count. Some parameters are frozen or never used."""

    def __init__(self, vocabulary: int = 256, dropout: float = 0.0, fails: int | None = None):
        super().__init__(fails)
        self.tokens, self.bend = nn.Embedding(vocabulary, 5), nn.Linear(5, 6)
        self.dropout, self.head, self.unused = nn.Dropout(dropout), nn.Linear(6, vocabulary), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)

    def logits(self, ids: Tensor) -> Tensor:
        embedded = self.dropout(self.tokens(ids))
        mean = embedded.cumsum(dim=1) / torch.arange(1, ids.shape[1] + 1).to(embedded)[:, None]
        hidden = self.noted(torch.tanh(self.bend(mean + embedded)))
        return self.head(self.dropout(hidden + self.frozen))


class Table(Recorded):
    """A table of pairs: a row of logits for each id that came before. Rows are given, as they are."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = nn.Parameter(rows)

    def logits(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows)


def made(kind: Callable[[], nn.Module] = Averages, seed: int = 1) -> Any:
    """A model in float64 with weights of its own, always the same."""
    model = kind().double()
    refill(model, seed)
    return model


def refill(model: nn.Module, seed: int) -> None:
    """Other values for all parameters, none of them zero."""
    source = generator(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=source, dtype=torch.float64) / max(1, *weight.shape[-1:]) ** 0.25)


def weights_of(model: nn.Module) -> Results:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def gradients_of(model: nn.Module) -> Results:
    named = model.named_parameters()
    return {f"gradient of {name}": Said("nothing") if each.grad is None else each.grad.detach().clone() for name, each in named}


def modes_of(model: nn.Module) -> Results:
    return {f"{name or 'the model'} in training mode": module.training for name, module in model.named_modules()}


# The oracle


def nats(model: nn.Module, batches: Batches) -> Tensor:
    """The mean loss over all targets that count, one row at a time, from PyTorch's cross-entropy."""
    found = [
        F.cross_entropy(model(row[None])[0], wanted, ignore_index=IGNORED, reduction="none")[wanted != IGNORED]
        for inputs, targets in batches
        for row, wanted in zip(inputs, targets, strict=True)
    ]
    return torch.cat(found).mean()


def budget(value: float, limit: float, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


# Stages
