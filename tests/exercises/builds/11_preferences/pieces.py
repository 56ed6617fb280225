"""What the stages of build 11 share: models that record their calls, pairs of random tokens, and the oracle: each answer alone in a row.

Tolerance: rows of other sizes add up in another order, which moves float64 by some 1e-15 of the largest summand.
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
ALONE = "each answer alone in a row, in float64"
NEAR = {"rtol": 1e-9, "atol": 1e-9}
EXACT = {"rtol": 0.0, "atol": 0.0}
WITHIN = "within the budget"
WIDTH, VOCABULARY = 12, 29

Results = dict[str, Any]
Example = tuple[list[int], list[bool]]
Examples = list[tuple[Example, Example]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Models


@dataclass
class Call:
    """One call of a model: its input, the mode, whether gradients are recorded, and how many logits of earlier calls there still are."""

    ids: Tensor
    training: bool
    gradients: bool
    alive: int


class Recorded(nn.Module):
    """A causal model that notes its calls. journal: may be shared with an optimizer, which notes its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.journal: list[Any] = []
        self.storages: list[StorageWeakRef] = []

    def forward(self, input_ids: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        alive = sum(not storage.expired() for storage in self.storages)
        self.calls.append(Call(input_ids.clone(), self.training, torch.is_grad_enabled(), alive))
        self.journal.append(self.calls[-1])
        documents = torch.zeros_like(input_ids) if documents is None else documents
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids) if positions is None else positions
        logits = self.logits(input_ids, documents, positions)
        self.storages.append(StorageWeakRef(logits.untyped_storage()))
        return logits

    def logits(self, input_ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError(type(self).__name__)


class Attention(Recorded):
    """A transformer of one layer, with as many learned positions as WIDTH. The norm after it is a module without weights of its own."""

    def __init__(self, dropout: float = 0.0, vocabulary: int = VOCABULARY, features: int = 6):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, features), nn.Embedding(WIDTH, features)
        self.queries, self.others = nn.Linear(features, features, bias=False), nn.Linear(features, 2 * features, bias=False)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(features, vocabulary)

    def logits(self, input_ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        x = self.dropout(self.tokens(input_ids) + self.places(positions))
        keys, values = self.others(x).chunk(2, dim=-1)
        allowed = (documents[:, :, None] == documents[:, None]) & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (self.queries(x) @ keys.mT).masked_fill(~allowed, float("-inf"))
        x = x + scores.softmax(dim=-1) @ values
        return self.head(torch.tanh(self.dropout(x)))


class Recurrence(Recorded):
    """A recurrence that restarts at the beginning of each document, and knows no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.state, self.head = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 5), nn.Linear(5, VOCABULARY)

    def logits(self, input_ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        x, states = self.tokens(input_ids), []
        for place in range(x.shape[1]):
            before = states[-1] if states else torch.zeros_like(x[:, 0])
            if place:
                before = before * (documents[:, place] == documents[:, place - 1])[:, None]
            states.append(torch.tanh(x[:, place] + self.state(before)))
        return self.head(torch.stack(states, dim=1))


class Table(Recorded):
    """A bigram model: a row of logits for each token that came before. Rows are given, as they are."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = nn.Parameter(rows)

    def logits(self, input_ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        return F.embedding(input_ids, self.rows)


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


# Pairs


def example(prompt: list[int], answer: list[int]) -> Example:
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def pairs_of(sizes: list[tuple[int, int, int]], seed: int = 0, vocabulary: int = VOCABULARY) -> Examples:
    """sizes: of the prompt, the chosen and the rejected answer, of each pair. Ids are drawn from the whole vocabulary, 0 too."""
    generator, found = torch.Generator().manual_seed(100 + seed), []
    for prompt, chosen, rejected in sizes:
        drawn = torch.randint(vocabulary, (prompt + chosen + rejected,), generator=generator).tolist()
        found.append((example(drawn[:prompt], drawn[prompt : prompt + chosen]), example(drawn[:prompt], drawn[prompt + chosen :])))
    return found


SIZES = [(3, 4, 2), (2, 1, 6), (5, 8, 3), (1, 2, 2), (4, 3, 5), (6, 2, 7)]  # the third has WIDTH + 1 ids


# The oracle


def alone(model: Recorded, one: Example) -> tuple[Tensor, Tensor]:
    """Logits and targets of an example's trained tokens, of a call with nothing else in it."""
    ids, trained = torch.tensor(one[0]), torch.tensor(one[1])
    return model(ids[None, :-1])[0][trained[1:]], ids[1:][trained[1:]]


def sums(model: Recorded, examples: Examples) -> Tensor:
    """[pairs, 2]: log-probabilities of answers."""
    wide = lambda logits: logits.to(torch.promote_types(logits.dtype, torch.float32))  # noqa: E731
    found = [torch.distributions.Categorical(logits=wide(logits)).log_prob(targets).sum()
             for pair in examples for logits, targets in (alone(model, one) for one in pair)]  # fmt: skip
    return torch.stack(found).view(-1, 2)


def scores(model: Recorded, examples: Examples) -> Tensor:
    """`sums` in evaluation mode, without a graph."""
    with torch.no_grad():
        return sums(model.eval(), examples)


def tokens_of(examples: Examples) -> Tensor:
    return torch.tensor([[sum(trained) for _, trained in pair] for pair in examples])


def settings_of(loss: str = "sigmoid", beta: float = 0.3, label_smoothing: float = 0.0, gamma: float = 0.0) -> Results:
    return {"loss": loss, "beta": beta, "label_smoothing": label_smoothing, "gamma": gamma}


def pair_losses(settings: Results, policy: Tensor, reference: Tensor | None, tokens: Tensor) -> Tensor:
    """The losses by functions of PyTorch that are none of log sigmoid: cross-entropies of a yes or no, mean squares, margins, logits."""
    beta = settings["beta"]
    moved = policy if reference is None else policy - reference.detach()
    chosen, rejected = (moved / tokens if settings["loss"] in ("ipo", "simpo", "orpo") else moved).unbind(1)
    yes = lambda x, share=1.0: F.binary_cross_entropy_with_logits(x, torch.full_like(x, share), reduction="none")  # noqa: E731
    match settings["loss"]:
        case "sigmoid":
            return yes(beta * (chosen - rejected), 1 - settings["label_smoothing"])
        case "hinge":
            return F.margin_ranking_loss(beta * chosen, beta * rejected, torch.ones_like(chosen), margin=1.0, reduction="none")
        case "ipo":
            return F.mse_loss(chosen - rejected, torch.full_like(chosen, 0.5 / beta), reduction="none")
        case "simpo":
            return yes(beta * (chosen - rejected) - settings["gamma"])
    return -chosen + beta * yes(torch.logit(chosen.exp()) - torch.logit(rejected.exp()))


def refused(error: ValueError, said: tuple[str, ...], wanted: str) -> str:
    """Whether a ValueError says what it must: each word of `said`, or one of those with | between them."""
    missing = [word for word in said if not any(each in str(error) for each in word.split("|"))]
    return wanted if not missing else f"ValueError, which does not say {missing[0].replace('|', ' or ')}: {error}"


def budget(value: int, limit: int, unit: str) -> str:
    return WITHIN if value <= limit else f"{value:,} {unit}, and the budget is {limit:,}"


# Stages
