"""Attention over ranks as threads, and written out in one process, for the tests of ring attention."""

import torch
from torch import Tensor

from shared.model.attention import grouped_query_attention
from shared.model.masks import Causal, Documents, Full, Mask, Prefix, Window
from shared.parallel.comm.threads import run_threads
from shared.parallel.context.axis import Attend
from shared.parallel.context.ring import ring_attention
from shared.parallel.context.zigzag import ContextMask, SequenceShare

BATCH, HEADS, SHARED, SIZE, SEQ = 2, 4, 2, 6, 48
TWO_OF_FOUR = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
LENGTHS = [[13, 1, 2, 27, 5], [48]]
PACKED = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in LENGTHS])
RULES = {
    "full": Full(), "causal": Causal(), "window": Causal() & Window(5), "packed": Causal() & Documents(PACKED),
    "prefix": Causal() | Prefix(torch.tensor([3, 20])), "packed, both ways": Full() & Documents(PACKED),
    "window in packed": Causal() & Window(7) & Documents(PACKED), "one document is nobody's": Causal() & Window(5) & Prefix(10),
}  # fmt: skip


def given(length: int = SEQ, scale: float = 1.0, dtype=torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(BATCH, heads, length, SIZE) for heads in (HEADS, SHARED, SHARED, HEADS)]
    queries, *rest = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return [x.to(dtype) for x in (scale * queries, *rest)]


def no_bias(queries: Tensor, keys: Tensor) -> None:
    return None


def alone(rule: Mask, tensors: list[Tensor], bias=no_bias, scale: float = 0.4) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values, in float64, written out."""
    *inputs, upstream = (x.double() for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    places = torch.arange(inputs[0].shape[2])
    allowed = rule.allowed(places[:, None], places[None, :])
    allowed = allowed[:, None] if allowed.dim() == 3 else allowed[None, None]
    out = grouped_query_attention(*inputs, allowed, bias(places, places), scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def over_ranks(
    ranks: int, rule: Mask, tensors: list[Tensor], bias=no_bias, attend: Attend = ring_attention, scale: float = 0.4
) -> list[Tensor]:
    """The same by ranks that each have a share."""
    length = tensors[0].shape[2]

    def work(world):
        indices = SequenceShare(world).indices(length)
        *inputs, upstream = (x.index_select(2, indices) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        mask = ContextMask(rule, world, length, bias, torch.device("cpu"))
        out = attend(*inputs, mask, scale)
        return indices, [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    told = run_threads(work, ranks)
    back = torch.cat([indices for indices, _ in told]).argsort()
    return [torch.cat(parts, dim=2).index_select(2, back) for parts in zip(*(found for _, found in told), strict=True)]


def require_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()
