"""Chapter 07. Zigzag order of a sequence over ranks, and the block-sparse attention mask over its chunks.

    2 n chunks for n ranks; rank r has chunks r and 2 n - 1 - r              4 ranks:   0 7 | 1 6 | 2 5 | 3 4

Under a causal mask the last quarter of a sequence looks at seven times as many keys as the first one. An early and a late chunk together
look at the same number on every rank. A position keeps its place in the whole sequence as its index: rotations, learned positions, biases
and masks all go by that, and by nothing local.

Mask rules (chapter 02: causal, window, documents) take global positions, so each rank evaluates them for its own chunks and files every
block as empty, partial, causal or full. The ranks exchange these numbers (an all-gather of 4 n bytes for each rank, once per forward pass
and type of layer), because a rank that passes on keys must know who still looks at them. A tensor of a block's mask is made when the block
is computed, and dropped after it.

    early chunks travel up the ring, late ones down, each as far as the last rank that looks at it

A query looks back, so an early chunk is looked at by ranks above and a late one by ranks below: with a causal mask late chunks stop at
rank 0, and with a window shorter than a chunk every chunk travels to one neighbour only.

Left out on purpose: other shares for other masks. Packed documents of very unequal length leave some ranks with more work than others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError, nearest_multiples
from shared.model.masks import AttentionMask, Mask
from shared.parallel.comm.communicator import Communicator
from shared.totals import Batch, Objective, Totals

# Entries of a batch that masks read, at indices that count from the start of the sequence.
READ_WHOLE = ("documents", "documents_on_host", "valid")


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The early and the late chunk of a rank, of 2 * ranks."""
    return rank, 2 * ranks - 1 - rank


def require_divisible(length: int, ranks: int, setting: str = "The sequence") -> None:
    """Refuse a sequence that does not divide into two equal chunks for each rank, with the nearest lengths that do."""
    chunks = 2 * ranks
    if length % chunks:
        raise SettingError(
            f"{setting} has {length} positions, and parallel.context_parallel {ranks} cuts it into {chunks} equal chunks, two for each "
            f"rank: give {nearest_multiples(length, chunks)}, or other ranks."
        )


class SequenceShare:
    """One rank's share of every sequence.

    Attributes:
        group: the ranks that share each sequence, the mesh's cp.
        length: of the whole sequence, while an objective works on a share of it; None outside, where models get whole sequences.
    """

    def __init__(self, group: Communicator):
        self.group, self.length = group, None

    @contextmanager
    def of(self, length: int) -> Iterator[None]:
        """A context in which the model's inputs are this rank's positions of sequences of `length`."""
        self.length = length
        try:
            yield
        finally:
            self.length = None

    def indices(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """[length / ranks] int64: the indices of this rank's positions in the whole sequence."""
        chunks = torch.arange(length, device=device).view(2 * self.group.size, -1)
        return chunks[list(own_chunks(self.group.rank, self.group.size))].flatten()

    def cut(self, batch: Batch) -> Batch:
        """This rank's positions of a batch: of every entry [batch, seq, ...] but those that masks read, which stay whole. Targets must have
        been shifted before: the token after a chunk's last one is another rank's."""
        rows, length = batch["input_ids"].shape
        require_divisible(length, self.group.size, "A batch's sequence")
        return {
            name: tensor if name in READ_WHOLE or tensor.shape[:2] != (rows, length) else self.own_positions(tensor)
            for name, tensor in batch.items()
        }

    def own_positions(self, tensor: Tensor) -> Tensor:
        """This rank's positions of [batch, seq, ...]."""
        return tensor.index_select(1, self.indices(tensor.shape[1], tensor.device))

    def of_share(self, objective: Objective) -> Objective:
        """The objective over the tokens at this rank's positions."""

        def objective_of_share(model: nn.Module, batch: Batch) -> Totals:
            with self.of(batch["input_ids"].shape[1]):
                return objective(model, self.cut(batch))

        return objective_of_share


NOBODY, SOME, TRIANGLE, ALL = range(4)  # who looks in a block


class ContextMask:
    """A mask over a sequence of which each rank has two chunks. It takes the place of an `AttentionMask`.

    Args:
        rule: which keys a query may look at.
        group: the ranks that share the sequence.
        length: of the whole sequence.
        position_bias: position_bias(queries [Q], keys [T]) -> None or [1, heads, Q, T], by indices in the whole sequence.

    Attributes:
        looks: [chunk of queries][chunk of keys] -> NOBODY, SOME, TRIANGLE or ALL.
        reach: chunk of keys -> how many hops it travels around the ring.
    """

    bias = None  # no tensor of it is kept

    def __init__(
        self, rule: Mask, group: Communicator, length: int, position_bias: Callable[[Tensor, Tensor], Tensor | None], device: torch.device
    ):
        self.rule, self.group, self.position_bias, self.device = rule, group, position_bias, device
        self.chunks, self.size = 2 * group.size, length // (2 * group.size)
        self.looks = self.all_looks()
        self.reach = [self.farthest(chunk) for chunk in range(self.chunks)]

    def indices(self, chunk: int) -> Tensor:
        """[length / chunks] int64: the indices of a chunk's positions in the whole sequence."""
        return torch.arange(chunk * self.size, (chunk + 1) * self.size, device=self.device)

    def allowed(self, queries: int, keys: int) -> Tensor:
        """The rule for a chunk of queries and one of keys: bool [batch or 1, 1, Q, T]."""
        allowed = self.rule.allowed(self.indices(queries)[:, None], self.indices(keys)[None, :])
        return (allowed[:, None] if allowed.dim() == 3 else allowed[None, None]).expand(-1, 1, self.size, self.size)

    def block(self, queries: int, keys: int) -> AttentionMask:
        """The mask of one block."""
        bias = self.position_bias(self.indices(queries), self.indices(keys))
        looks = self.looks[queries][keys]
        if looks == ALL:
            return AttentionMask(bias=bias)
        if looks == TRIANGLE and bias is None:
            return AttentionMask(causal=True)
        return AttentionMask(allowed=self.allowed(queries, keys), bias=bias)

    def all_looks(self) -> list[list[int]]:
        """All-gather the kinds of all blocks: one `look` for each chunk of queries and each chunk of keys."""
        mine = [[self.look(queries, keys) for keys in range(self.chunks)] for queries in own_chunks(self.group.rank, self.group.size)]
        answers = torch.stack([torch.stack(row) for row in mine]).to(torch.uint8)
        everyone = answers.new_empty(self.group.size, *answers.shape)
        self.group.all_gather(everyone, answers)
        rows: dict[int, list[int]] = {}
        for rank, pair in enumerate(everyone.tolist()):
            rows |= zip(own_chunks(rank, self.group.size), pair, strict=True)
        return [rows[chunk] for chunk in range(self.chunks)]

    def look(self, queries: int, keys: int) -> Tensor:
        """The kind of a block of this rank, []: NOBODY, SOME, TRIANGLE or ALL."""
        allowed = self.allowed(queries, keys)
        triangle = (allowed == torch.ones_like(allowed).tril()).all() & (queries == keys)
        return torch.where(allowed.all(), ALL, torch.where(triangle, TRIANGLE, torch.where(allowed.any(), SOME, NOBODY)))

    def direction(self, chunk: int) -> int:
        """1 for early chunks, which travel to the next rank; -1 for late ones, which travel to the previous one."""
        return 1 if chunk < self.group.size else -1

    def owner(self, chunk: int) -> int:
        """The rank that has a chunk's positions."""
        return min(chunk, self.chunks - 1 - chunk)

    def holder(self, chunk: int, hops: int) -> int:
        """The rank that a chunk's keys have reached after some hops."""
        return (self.owner(chunk) + hops * self.direction(chunk)) % self.group.size

    def farthest(self, chunk: int) -> int:
        """After how many hops a chunk has passed the last rank that looks at it."""
        lookers = [hops for hops in range(self.group.size) if self.is_wanted(chunk, self.holder(chunk, hops))]
        return max(lookers, default=0)

    def is_wanted(self, chunk: int, rank: int) -> bool:
        return any(self.looks[queries][chunk] for queries in own_chunks(rank, self.group.size))

    def held(self, hops: int) -> list[int]:
        """The chunks of keys at this rank after some hops."""
        return [chunk for chunk in range(self.chunks) if hops <= self.reach[chunk] and self.holder(chunk, hops) == self.group.rank]
