"""Chapter 07. Tensor-parallel layers: row-parallel linear layer, vocabulary-parallel embedding, head and cross-entropy, dropout on shards.

A matrix that is cut by columns (its output features) needs no class: f stands in front of it, and each rank computes its features. Cut by
rows (its input features), each rank has a part of every output, and g adds the parts up; the bias is added once, to the sum.

A vocabulary is cut by tokens, evenly or not, so nothing is padded: no rank ever holds a logit of a token that does not exist.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.embedding import Head, TargetScores
from shared.parallel.comm.communicator import Communicator
from shared.parallel.tensor.operators import join_vocabulary, sum_over_ranks


class RowLinear(nn.Linear):
    """A linear layer of which this rank holds some input features: [..., in / ranks] -> [..., out].

    combine: adds up what the ranks have: `sum_over_ranks`, or `scatter_sequence`, of which this rank keeps its positions.
    """

    combine: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        whole = self.combine(F.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias


class VocabularyEmbedding(nn.Embedding):
    """Token embeddings of which this rank holds the rows from `first` on: ids [...] -> [..., D]."""

    first: int
    group: Communicator

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"Token ids from {int(ids.min())} to {int(ids.max())} in a vocabulary of {self.num_embeddings}.")
        local = ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return sum_over_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


class VocabularyHead(Head):
    """A head of which this rank holds some tokens' rows. `forward` returns their logits: [..., D] -> [..., vocab of this rank].

    sizes: how many tokens each rank of `group` has.
    """

    sizes: list[int]
    group: Communicator

    def scores(self, logits: Tensor, targets: Tensor) -> TargetScores:
        return VocabularyScores(logits, targets, sum(self.sizes[: self.group.rank]), self.group)

    def whole_logits(self, logits: Tensor) -> Tensor:
        return join_vocabulary(logits, self.sizes, self.group)


class VocabularyScores(TargetScores):
    """Vocabulary-parallel cross-entropy: what losses compute from the logits of some tokens on each rank (Shoeybi et al. 2019, section 3).

        loss = log(sum over ranks of sum exp(logits - largest)) + largest - logit of the target

    Two all-reduces of numbers by row, whatever the vocabulary: the largest logit; then the sum of exponentials beside the target's logit,
    which is 0 on all ranks but the one that has it.

    Args:
        logits: [rows, vocab of this rank].
        first: the token of the first column.

    Attributes:
        largest, normalizer, chosen: the largest logit, the logarithm of the sum of exponentials, and the target's logit, each of the whole
            vocabulary: [rows].
    """

    def __init__(self, logits: Tensor, targets: Tensor, first: int, group: Communicator):
        super().__init__(logits, targets)
        local = targets - first
        self.here = self.counted & (local >= 0) & (local < logits.shape[-1])
        self.local = local.masked_fill(~self.here, 0).unsqueeze(-1)
        wide = logits.to(self.dtype)
        self.largest = wide.amax(dim=-1)
        group.all_reduce(self.largest, op="max")
        sums = (wide - self.largest.unsqueeze(-1)).exp_().sum(dim=-1)
        chosen = wide.gather(-1, self.local).squeeze(-1).masked_fill(~self.here, 0)
        both = torch.stack([sums, chosen])
        group.all_reduce(both)
        self.normalizer, self.chosen = both[0].log() + self.largest, both[1]

    def cross_entropy(self) -> tuple[Tensor, Tensor]:
        return self.token_losses().sum(), self.counted.sum()

    def token_losses(self) -> Tensor:
        return (self.normalizer - self.chosen).masked_fill(~self.counted, 0)

    def gradient(self) -> Tensor:
        gradient = (self.logits.to(self.dtype) - self.normalizer.unsqueeze(-1)).exp_()
        gradient.scatter_add_(-1, self.local, -self.here.to(self.dtype).unsqueeze(-1))
        return gradient.mul_(self.counted.unsqueeze(-1)).to(self.logits.dtype)

    def count_correct(self) -> Tensor:
        return (self.counted & (self.chosen == self.largest)).sum()


class ShardDropout(nn.Dropout):
    """Dropout of activations of which each rank has a part: every rank draws its own mask."""

    group: Communicator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return with_random_numbers_of_rank(lambda: F.dropout(x, self.p), x.device, self.group.rank)


def attend_with_own_dropout(attend: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    """Attention (as `Attention.attend`) whose dropout differs between tensor-parallel ranks, since each has other heads."""

    def run(queries: Tensor, *more) -> Tensor:
        dropout = more[-1]
        if not dropout:
            return attend(queries, *more)
        return with_random_numbers_of_rank(lambda: attend(queries, *more), queries.device, rank)

    return run


def with_random_numbers_of_rank(draw: Callable[[], Tensor], device: torch.device, rank: int) -> Tensor:
    """`draw()` with random numbers that differ between tensor-parallel ranks, whose generators agree before it and after it.

    The generators are seeded from the rank and one number of the CPU's, which is the same on all ranks. So nothing needs to be kept between
    calls or in checkpoints, and a forward pass that is computed again draws the same.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + rank)
        return draw()
