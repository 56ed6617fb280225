"""Chapter 07. Block-sparse attention mask of a sequence in chunks: which queries look at which keys, and so which keys must travel.

Mask rules (chapter 02: causal, window, documents) take global positions, so each rank evaluates them for its own chunks and files every
block as empty, partial, causal or full. The ranks exchange these numbers (an all-gather of 4 n bytes for each rank, once per forward pass
and type of layer), because a rank that passes on keys must know who still looks at them. A tensor of a block's mask is made when the block
is computed, and dropped after it.

    early chunks travel up the ring, late ones down, each as far as the last rank that looks at it

A query looks back, so an early chunk is looked at by ranks above and a late one by ranks below: with a causal mask late chunks stop at
rank 0, and with a window shorter than a chunk every chunk travels to one neighbour only.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shared.model.masks import AttentionMask, Mask
from shared.parallel.comm.communicator import Communicator
from shared.parallel.context.zigzag import own_chunks

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
        """[length / chunks] int64: where a chunk's positions stand in the whole sequence."""
        return torch.arange(chunk * self.size, (chunk + 1) * self.size, device=self.device)

    def allowed(self, queries: int, keys: int) -> Tensor:
        """The rule for a chunk of queries and one of keys: bool [batch or 1, 1, Q, T]."""
        allowed = self.rule.allowed(self.indices(queries)[:, None], self.indices(keys)[None, :])
        return (allowed[:, None] if allowed.dim() == 3 else allowed[None, None]).expand(-1, 1, self.size, self.size)

    def block(self, queries: int, keys: int) -> AttentionMask:
        """What attention within a block takes."""
        bias = self.position_bias(self.indices(queries), self.indices(keys))
        looks = self.looks[queries][keys]
        if looks == ALL:
            return AttentionMask(bias=bias)
        if looks == TRIANGLE and bias is None:
            return AttentionMask(causal=True)
        return AttentionMask(allowed=self.allowed(queries, keys), bias=bias)

    def all_looks(self) -> list[list[int]]:
        """Which queries look at which keys, block by block, on all ranks: one `look` for each chunk of queries and each chunk of keys."""
        mine = [[self.look(queries, keys) for keys in range(self.chunks)] for queries in own_chunks(self.group.rank, self.group.size)]
        answers = torch.stack([torch.stack(row) for row in mine]).to(torch.uint8)
        everyone = answers.new_empty(self.group.size, *answers.shape)
        self.group.all_gather(everyone, answers)
        rows: dict[int, list[int]] = {}
        for rank, pair in enumerate(everyone.tolist()):
            rows |= zip(own_chunks(rank, self.group.size), pair, strict=True)
        return [rows[chunk] for chunk in range(self.chunks)]

    def look(self, queries: int, keys: int) -> Tensor:
        """Which queries of a block of this rank look at its keys, []: NOBODY, SOME, TRIANGLE or ALL."""
        allowed = self.allowed(queries, keys)
        triangle = (allowed == torch.ones_like(allowed).tril()).all() & (queries == keys)
        return torch.where(allowed.all(), ALL, torch.where(triangle, TRIANGLE, torch.where(allowed.any(), SOME, NOBODY)))

    def direction(self, chunk: int) -> int:
        """Early chunks travel to the next rank, late ones to the one before."""
        return 1 if chunk < self.group.size else -1

    def owner(self, chunk: int) -> int:
        """The rank whose positions a chunk's are."""
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
        """The chunks of keys that are at this rank after some hops."""
        return [chunk for chunk in range(self.chunks) if hops <= self.reach[chunk] and self.holder(chunk, hops) == self.group.rank]
