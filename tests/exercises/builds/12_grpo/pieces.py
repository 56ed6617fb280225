"""What the stages of build 12 share: models that record their calls, settings, and the oracle: each answer alone, without a cache.

Tolerance: a cache and other batches add up in another order, which moves float64 by some 1e-15 of the largest summand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared.course.checking import Case
from shared.course.comparing import Said

TEXT = "the text of build.py: stage {}"
ALONE = "each answer alone, without a cache, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}
WITHIN = "within the budget"
VOCABULARY, ROOM = 11, 14  # tokens, and positions that `Attention` has

Results = dict[str, Any]
Prompts = list[list[int]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Models


@dataclass
class Call:
    """One call of a model: its input, whether it was cached and recorded gradients, and how many logits of other calls are left."""

    ids: Tensor
    cached: bool
    gradients: bool
    alive: int


def attention(layer: str, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention without a cache, written out."""
    keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    later = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).triu(1)
    scores = (queries @ keys.mT / math.sqrt(queries.shape[3])).masked_fill(later, float("-inf"))
    return scores.softmax(dim=-1) @ values


class Kept(torch.autograd.Function):
    """The same numbers, which the graph keeps as long as it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x := x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0 * ctx.saved_tensors[0].numel()


class Recorded(nn.Module):
    """A model that notes its calls. journal: its calls, and the steps of an optimizer that was given it."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[Any] = []
        self.storages: list[StorageWeakRef] = []

    @property
    def calls(self) -> list[Call]:
        return [each for each in self.journal if isinstance(each, Call)]

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, attend: Callable = attention) -> Tensor:
        alive = sum(not storage.expired() for storage in self.storages)
        self.journal.append(Call(input_ids.clone(), attend is not attention, torch.is_grad_enabled(), alive))
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids) if positions is None else positions
        if positions.shape != input_ids.shape:
            raise ValueError(f"positions have shape {list(positions.shape)}, and input_ids {list(input_ids.shape)}")
        logits = Kept.apply(self.logits(input_ids, positions, attend))
        self.storages.append(StorageWeakRef(logits.untyped_storage()))
        return logits

    def logits(self, input_ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        raise NotImplementedError(type(self).__name__)


class Layer(nn.Module):
    """Attention with H query heads and K key-value heads of d numbers, around which x is added."""

    def __init__(self, name: str, features: int, H: int, K: int, d: int):
        super().__init__()
        self.name, self.d = name, d
        self.queries, self.keys, self.values = (nn.Linear(features, heads * d, bias=False) for heads in (H, K, K))
        self.output = nn.Linear(H * d, features, bias=False)

    def forward(self, x: Tensor, attend: Callable, turned: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        heads = [each(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for each in (self.queries, self.keys, self.values)]
        found = attend(self.name, turned(heads[0]), turned(heads[1]), heads[2])
        return x + self.output(found.transpose(1, 2).flatten(2))


class Attention(Recorded):
    """A transformer of two layers of different sizes, with as many learned positions as ROOM."""

    def __init__(self, vocabulary: int = VOCABULARY, features: int = 6):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, features), nn.Embedding(ROOM, features)
        self.first, self.second = Layer("first", features, 4, 2, 3), Layer("second", features, 2, 1, 4)
        self.head = nn.Linear(features, vocabulary)

    def logits(self, input_ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        x = self.first(self.tokens(input_ids) + self.places(positions), attend)
        return self.head(torch.tanh(self.second(torch.tanh(x), attend)))


class Rotary(Recorded):
    """A transformer of one layer, whose queries and keys are rotated by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(VOCABULARY, 5), Layer("0", 5, 3, 3, 4), nn.Linear(5, VOCABULARY)

    def logits(self, input_ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        angles = positions[:, None, :, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)

        def turned(x: Tensor) -> Tensor:
            left, right = x.chunk(2, dim=-1)
            return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1).to(x.dtype)

        return self.head(torch.tanh(self.layer(self.tokens(input_ids), attend, turned)))


class Table(Recorded):
    """A bigram model: a row of logits for each token that came before. Its layers attend to d zeros, and add nothing."""

    def __init__(self, rows: Tensor, layers: int = 1, d: int = 1):
        super().__init__()
        self.rows, self.layers, self.d = nn.Parameter(rows), layers, d

    def logits(self, input_ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        logits, nothing = F.embedding(input_ids, self.rows), torch.zeros(len(input_ids), 1, input_ids.shape[1], self.d).to(self.rows)
        for layer in range(self.layers):
            logits = logits + attend(str(layer), nothing, nothing, nothing)[:, 0, :, :1]
        return logits


def made(kind: Callable[[], Recorded], seed: int = 1) -> Recorded:
    """A model with weights of its own, always the same."""
    model, generator = kind().double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / max(1, weight.shape[-1]) ** 0.25)
    return model


def weights_of(model: nn.Module) -> Results:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def gradients_of(model: nn.Module) -> Results:
    named = model.named_parameters()
    return {f"gradient of {name}": Said("nothing") if each.grad is None else each.grad.detach().clone() for name, each in named}


# Prompts and settings

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [0, 0], [7, 10, 3, 8]]


def settings_of(**changes: Any) -> Results:
    """Settings, in which a loss is easily taken for another one."""
    return {"end": 0, "limit": 4, "temperature": 0.8, "prompts": 2, "group": 3, "updates": 2, "micro_size": 4, "scale": "group",
            "level": "token", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token"} | changes  # fmt: skip


# The oracle


def distribution(logits: Tensor, temperature: float, top_p: float = 1.0) -> list[float]:
    """The probabilities of a row of logits, token by token, after temperature and top-p."""
    row = logits.double().tolist()
    if temperature == 0:
        return [float(token == row.index(max(row))) for token in range(len(row))]
    weights = [math.exp((each - max(row)) / temperature) for each in row]
    kept, reached = set(), 0.0
    for token in sorted(range(len(row)), key=lambda token: -weights[token]):
        if reached < top_p or top_p == 1:
            kept.add(token)
            reached += weights[token] / math.fsum(weights)
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(row))]


def next_logits(model: Recorded, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]))[0, -1]


def alone(model: Recorded, prompt: list[int], ids: list[int], temperature: float) -> Tensor:
    """The log-probabilities [tokens] of an answer, of a call with nothing else in it, with a graph."""
    logits = model(torch.tensor([prompt + ids[:-1]]))[0, len(prompt) - 1 :]
    return torch.distributions.Categorical(logits=logits / temperature).log_prob(torch.tensor(ids))


def likeliest(model: Recorded, prompt: list[int], end: int, limit: int) -> list[int]:
    """The answer token by token, computed again from the beginning for each."""
    ids: list[int] = []
    while len(ids) < limit and ids[-1:] != [end]:
        ids.append(int(next_logits(model, prompt + ids).argmax()))
    return ids


def refused(error: ValueError, said: tuple[str, ...], wanted: str) -> str:
    """Whether a ValueError says what it must: each word of `said`, or one of those with | between them."""
    missing = [word for word in said if not any(each in str(error) for each in word.split("|"))]
    return wanted if not missing else f"ValueError, which does not say {missing[0].replace('|', ' or ')}: {error}"


def budget(value: float, limit: float, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


# Stages


def case(
    title: str, given: Results, expected: Callable[[], Results], observe: Callable[[Any], Results], source: int | str, **more: Any
) -> Case:
    """source: a stage, whose text says so, or who says so. more: the rung, "oracle" unless given, and tolerances."""
    rung = more.pop("rung", "oracle")
    says = TEXT.format(source) if isinstance(source, int) else source
    return Case(rung, title, lambda: given, lambda **_: expected(), says, lambda adapters, **_: observe(adapters), **NEAR | more)
