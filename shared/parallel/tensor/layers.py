"""Chapter 07. Tensor-parallel layers: row-parallel linear layer, vocabulary-parallel embedding, head and cross-entropy, dropout on shards.

A column-parallel linear layer (sharded output features) needs no class: f comes before it, and each rank computes its features. In a
row-parallel one (sharded input features) each rank has a summand of every output, and g sums them; the bias is added once, to the sum.

A vocabulary is sharded by tokens, evenly or not, so nothing is padded.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.embedding import Head, TargetScores
from shared.parallel.comm.communicator import Communicator
from shared.parallel.tensor.operators import join_vocabulary


@exercise("07.row_linear")
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, combine: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a row-parallel linear layer, of which this rank holds some input features (Shoeybi et al. 2019, section 3).

        y = x_0 A_0 + x_1 A_1 + ... + b          rank r has x_r and A_r, and so one summand of each output

    Args:
        x: [..., in / ranks], this rank's input features.
        weight: [out, in / ranks], its part of the layer's weight [out, in].
        bias: [out], the layer's bias, the same on all ranks; or None.
        combine: adds up the ranks' tensors, in the forward pass and for the backward pass: g, from [..., out] to [..., out]; or, with
            sequence parallelism, a reduce-scatter, which returns this rank's positions of the sum only. It is communication, and called
            once.

    Returns:
        What the uncut layer computes of the whole x, in the product's dtype (bfloat16 under autocast, though the bias is float32):
        [..., out]; of this rank's positions where `combine` returns only those.

    >>> x, weight, bias = torch.tensor([2.0]), torch.tensor([[10.0], [100.0]]), torch.tensor([1.0, 1.0])
    >>> row_linear(x, weight, bias, combine=lambda part: part + torch.tensor([3.0, 4.0]))      # what another rank has
    tensor([ 24., 205.])
    """


@exercise("07.vocabulary_cross_entropy")
def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Compute cross-entropy from logits of which each rank has some tokens' columns (Shoeybi et al. 2019, section 3).

        loss = log(sum over all tokens of exp(logit)) - logit of the target

    Gathering all logits would send and hold [rows, vocab] numbers. Two all-reduces are enough: of one number for each row, then of two. And
    a rank never holds more than three further tensors of the shape of its own logits. Exponentials overflow from 89 on (in float32), and
    logits may be larger: as in one process, the largest of the row is subtracted first, here the largest over all ranks.

    Args:
        logits: [rows, vocab of this rank], at least one column; another rank may have a column more or less. A token that cannot be has
            minus infinity. Autograd is off in here: the gradient is computed elsewhere, from the normalizer.
        targets: [rows] int64, the same on all ranks: tokens of the whole vocabulary, or -100 for a row that does not count.
        first: the token of this rank's first column.
        group: the ranks that share the vocabulary. `group.all_reduce(tensor, op="max")` replaces a contiguous tensor by the maximum over
            the ranks; op="sum" is the default.

    Returns:
        Three tensors, the same on all ranks, the first two in the dtype of the logits, or in float32 where the logits are narrower. All
        numbers are computed and sent in that dtype, too.

        losses: [rows]; 0 where a row does not count.
        normalizer: [rows], the logarithm of the sum of exponentials over the whole vocabulary, of all rows.
        correct: [rows] bool, whether the target's logit is the largest of its row, alone or in a tie; False where a row does not count.

    >>> logits, targets = torch.tensor([[0.0, 0.0], [0.0, 2.0]]).log1p(), torch.tensor([3, -100])     # 1, 1 and 1, 3 after exp
    >>> vocabulary_cross_entropy(logits, targets, first=2, group=SingleRankCommunicator())
    (tensor([0.6931, 0.0000]), tensor([0.6931, 1.3863]), tensor([ True, False]))
    """


class RowLinear(nn.Linear):
    """A row-parallel linear layer: [..., in / ranks] -> [..., out]. combine: sums over the ranks: g, or `scatter_sequence`."""

    combine: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.bias, self.combine)


class VocabularyEmbedding(nn.Embedding):
    """A vocabulary-parallel embedding, of which this rank has the rows from `first` on: ids [...] -> [..., D]. combine: g."""

    first: int
    combine: Callable[[Tensor], Tensor]

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"Token ids from {int(ids.min())} to {int(ids.max())} in a vocabulary of {self.num_embeddings}.")
        local = ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = self.look_up(local.masked_fill(elsewhere, 0))
        return self.combine(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def look_up(self, local: Tensor) -> Tensor:
        """Rows of this rank's shard, by local index."""
        return F.embedding(local, self.weight)


class VocabularyHead(Head):
    """A vocabulary-parallel head: [..., D] -> [..., vocab of this rank]. sizes: how many tokens each rank of `group` has."""

    sizes: list[int]
    group: Communicator

    def scores(self, logits: Tensor, targets: Tensor) -> TargetScores:
        return VocabularyScores(logits, targets, sum(self.sizes[: self.group.rank]), self.group)

    def whole_logits(self, logits: Tensor) -> Tensor:
        return join_vocabulary(logits, self.sizes, self.group)


class VocabularyScores(TargetScores):
    """Vocabulary-parallel cross-entropy and its gradient. logits: [rows, vocab of this rank]. first: the token of the first column."""

    def __init__(self, logits: Tensor, targets: Tensor, first: int, group: Communicator):
        super().__init__(logits, targets)
        local = targets - first
        self.here = self.counted & (local >= 0) & (local < logits.shape[-1])
        self.local = local.masked_fill(~self.here, 0).unsqueeze(-1)
        self.losses, self.normalizer, self.correct = vocabulary_cross_entropy(logits, targets, first, group)

    def cross_entropy(self) -> tuple[Tensor, Tensor]:
        return self.losses.sum(), self.counted.sum()

    def token_losses(self) -> Tensor:
        return self.losses

    def gradient(self) -> Tensor:
        gradient = (self.logits.to(self.dtype) - self.normalizer.unsqueeze(-1)).exp_()
        gradient.scatter_add_(-1, self.local, -self.here.to(self.dtype).unsqueeze(-1))
        return gradient.mul_(self.counted.unsqueeze(-1)).to(self.logits.dtype)

    def count_correct(self) -> Tensor:
        return self.correct.sum()


class ShardDropout(nn.Dropout):
    """Dropout of sharded activations: every rank samples its own mask."""

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
    """`draw()` with random numbers that differ between tensor-parallel ranks, whose generators agree before and after it.

    The seed is the rank plus one random number, the same on all ranks. So no state is kept between calls or in checkpoints, and a
    recomputed forward pass samples the same.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + rank)
        return draw()
