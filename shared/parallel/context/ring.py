"""Chapter 07. Ring attention: keys and values travel around the ranks while each rank's queries look at the keys that have arrived.

    step 0    a rank's own keys                    forward   n - 1 hops of keys and values at most, while a block is computed
    step s    keys that have travelled s hops      backward  the same once more, and their gradients in float32, one step behind

(Liu et al. 2023, "Ring Attention with Blockwise Transformers"; zigzag and two directions as in `shared.parallel.context.zigzag`.) In the
backward pass a chunk's gradient begins at the first rank that its keys reach, travels on with them, and is sent home from the last one.

Bytes that all ranks together send, for each layer, of chunks of c positions, with k = 2 * batch * key-value heads * c * head size numbers:

    forward    sum over chunks of reach * k * bytes of a number
    backward   sum over chunks of reach * k * (bytes of a number + 4)

`reach` is n - 1 for all 2 n chunks without a mask. With a causal one, late chunks reach rank 0 only: 3/2 n (n - 1) hops in all.

`gathered_attention` is the first version: an all-gather of all keys and values, and a reduce-scatter of their gradients. It sends the same
bytes as a ring without a mask, waits for all of them before it begins, and holds the whole sequence's keys on each rank.

Left out on purpose: dropout on the attention weights, whose mask would have to be the same for any number of ranks; and second derivatives.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.model.attention import sdpa_attention
from shared.model.masks import AttentionMask
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work
from shared.parallel.context.blocks import Part, attend_block, block_gradients, merge_attention
from shared.parallel.context.zigzag import ContextMask, own_chunks
from shared.parallel.tensor.operators import gather_sequence

Message = tuple[int, Tensor]  # the other rank, and what is sent or where it arrives


def ring_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: ContextMask, scale: float) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks.

    Args:
        queries: [batch, H, 2 c, d], of this rank's two chunks of c positions.
        keys, values: [batch, K, 2 c, d], of the same positions; K divides H.
        mask: who looks at whom in the whole sequence.

    Returns:
        [batch, H, 2 c, d] in the dtype of the values. Parts are merged in float32 (float64 for float64).
    """
    return RingAttention.apply(queries, keys, values, mask, scale)


class RingAttention(torch.autograd.Function):
    """Ring attention with its backward pass. Only this rank's part of each tensor is saved."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: ContextMask, scale: float) -> Tensor:
        own = own_chunks(mask.group.rank, mask.group.size)
        found: dict[int, Part] = {}
        with torch.autocast(queries.device.type, enabled=False):
            by_chunk = dict(zip(own, queries.chunk(2, dim=2), strict=True))
            for _, held in travelling(mask, dict(zip(own, pairs(keys, values), strict=True))):
                for chunk, block in blocks(mask, held):
                    part = attend_block(by_chunk[chunk], *held[block], mask.block(chunk, block), scale)
                    found[chunk] = Part(*merge_attention(*found[chunk], *part)) if chunk in found else part
            for chunk in own:
                found.setdefault(chunk, nothing(by_chunk[chunk]))
        # Heads innermost in memory: the output projection then takes a view of it, and one copy is kept for the backward pass.
        out = torch.cat([found[chunk].out.transpose(1, 2).to(values.dtype) for chunk in own], dim=1).transpose(1, 2)
        ctx.save_for_backward(queries, keys, values, out, torch.cat([found[chunk].lse for chunk in own], dim=2))
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        mask, own = ctx.mask, own_chunks(ctx.mask.group.rank, ctx.mask.group.size)
        queries, keys, values, out, lse = ctx.saved_tensors
        rows = {
            chunk: (up, q, Part(o, weight)) for chunk, up, q, o, weight in
            zip(own, *(x.chunk(2, dim=2) for x in (upstream.contiguous(), queries, out, lse)), strict=True)
        }  # fmt: skip
        of_queries = {chunk: torch.zeros_like(rows[chunk][1], dtype=lse.dtype) for chunk in own}
        gradients = Returning(mask)
        with torch.autocast(queries.device.type, enabled=False):
            for hops, held in travelling(mask, dict(zip(own, pairs(keys, values), strict=True))):
                found = {block: torch.zeros_like(pair, dtype=lse.dtype) for block, pair in held.items()}
                for chunk, block in blocks(mask, held):
                    up, q, whole = rows[chunk]
                    added, *of_pair = block_gradients(up, q, *held[block], whole, mask.block(chunk, block), ctx.scale)
                    of_queries[chunk] += added
                    for total, part in zip(found[block], of_pair, strict=True):
                        total += part
                gradients.add(hops, found)
        of_keys, of_values = torch.cat([gradients.home[chunk] for chunk in own], dim=3).to(keys.dtype)
        return torch.cat([of_queries[chunk] for chunk in own], dim=2).to(queries.dtype), of_keys, of_values, None, None


def pairs(keys: Tensor, values: Tensor) -> list[Tensor]:
    """Each chunk's keys and values as one message: [2, batch, K, c, d]."""
    return [torch.stack(pair) for pair in zip(keys.chunk(2, dim=2), values.chunk(2, dim=2), strict=True)]


def nothing(queries: Tensor) -> Part:
    """Attention to no key at all."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return Part(torch.zeros_like(queries, dtype=dtype), queries.new_full(queries.shape[:-1], -torch.inf, dtype=dtype))


def blocks(mask: ContextMask, held: Mapping[int, Tensor]) -> Iterator[tuple[int, int]]:
    """The blocks that this rank computes with the keys that it holds: (chunk of queries, chunk of keys)."""
    for chunk in own_chunks(mask.group.rank, mask.group.size):
        yield from ((chunk, block) for block in held if mask.looks[chunk][block])


def travelling(mask: ContextMask, own: dict[int, Tensor]) -> Iterator[tuple[int, dict[int, Tensor]]]:
    """Keys and values as they arrive: (hops, chunk -> [2, batch, K, c, d]). The next ones travel while the caller computes."""
    held, like = own, next(iter(own.values()))
    for hops in range(max(mask.reach) + 1):
        arriving = {chunk: torch.empty_like(like) for chunk in mask.held(hops + 1)}
        work = exchange(
            mask.group,
            {chunk: (mask.holder(chunk, hops + 1), held[chunk]) for chunk in held if mask.reach[chunk] > hops},
            {chunk: (mask.holder(chunk, hops), arriving[chunk]) for chunk in arriving},
        )
        yield hops, held
        work.wait()
        held = arriving


class Returning:
    """Gradients of keys and values in transit: each chunk's travels one step behind its keys, and home from the last rank that attended.

    home: this rank's chunks -> their gradients, complete after the last step.
    """

    def __init__(self, mask: ContextMask):
        self.mask, self.home = mask, {}
        self.arriving: dict[int, Tensor] = {}
        self.work: Work = Work()

    def add(self, hops: int, found: dict[int, Tensor]) -> None:
        """Add this rank's gradients of a step to those that arrived, and send them on."""
        mask = self.mask
        if hops == 0:
            self.home = found
            return
        self.receive()
        for chunk, gradient in found.items():
            gradient += self.arriving.pop(chunk, 0)
        like = next(iter(self.home.values()))
        for chunk in mask.held(hops + 1):
            self.arriving[chunk] = torch.empty_like(like)
        for chunk in self.home:
            if mask.reach[chunk] == hops:
                self.arriving[chunk] = torch.empty_like(like)
        self.work = exchange(
            mask.group,
            {chunk: (mask.holder(chunk, hops + 1 if hops < mask.reach[chunk] else 0), found[chunk]) for chunk in found},
            {chunk: (mask.holder(chunk, hops), tensor) for chunk, tensor in self.arriving.items()},
        )
        if hops == max(mask.reach):
            self.receive()

    def receive(self) -> None:
        """Wait for pending messages, and add the gradients that arrived home."""
        self.work.wait()
        for chunk in self.arriving.keys() & self.home.keys():
            self.home[chunk] += self.arriving.pop(chunk)


def exchange(group: Communicator, sends: Mapping[int, Message], receives: Mapping[int, Message]) -> Work:
    """Start to send and to receive at most one tensor for each chunk.

    Of two ranks, the lower one starts its sends to the other before its receives, and the higher one its receives: NCCL carries out what is
    between two ranks in the order of the calls, so two ranks that both sent first would wait for each other.
    """
    calls = [(peer, group.rank > peer, chunk, group.send, tensor) for chunk, (peer, tensor) in sends.items()]
    calls += [(peer, group.rank < peer, chunk, group.receive, tensor) for chunk, (peer, tensor) in receives.items()]
    works = [start(tensor, peer, asynchronous=True) for peer, _, _, start, tensor in sorted(calls, key=lambda call: call[:3])]
    return Work(lambda: wait_for(works))


def wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def gathered_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: ContextMask, scale: float) -> Tensor:
    """The same as `ring_attention`, by an all-gather of the keys and values of all ranks."""
    group = mask.group
    order = [chunk for rank in range(group.size) for chunk in own_chunks(rank, group.size)]  # as the gathered chunks lie
    keys, values = (gather_sequence(x.transpose(1, 2), group).transpose(1, 2) for x in (keys, values))
    rows = own_chunks(group.rank, group.size)
    allowed = torch.cat([torch.cat([mask.allowed(row, chunk) for chunk in order], dim=-1) for row in rows], dim=-2)
    there, here = (torch.cat([mask.indices(chunk) for chunk in chunks]) for chunks in (order, rows))
    bias = mask.position_bias(here, there)
    if bias is None:
        return sdpa_attention(queries, keys, values, AttentionMask(allowed=allowed), scale, 0.0)
    return sdpa_attention(queries, keys, values, AttentionMask(bias=bias.masked_fill(~allowed, -torch.inf)), scale, 0.0)
