"""Chapter 07. Tensor-parallel operators f and g, and their pair for sequence parallelism: each one's backward pass is the other's forward.

    f   f_and_g(group)[0]    identity         backward: all-reduce         before column-parallel matrices
    g   f_and_g(group)[1]    all-reduce       backward: identity           after a row-parallel matrix
        gather_sequence      all-gather       backward: reduce-scatter     f under sequence parallelism
        scatter_sequence     reduce-scatter   backward: all-gather         g under sequence parallelism
        split_sequence       own slice        backward: all-gather         a replicated stream becomes sharded
        join_sequence        all-gather       backward: own slice          ... and replicated again
        join_vocabulary      all-gather       backward: own slice          logits of all ranks

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.) An all-reduce is a reduce-scatter and an all-gather, so the
sequence-parallel pair sends the same bytes. After f every rank computes something else from the same x, so the gradients of x add; after g
all ranks compute the same, so each has the full gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.course.binding import exercise
from shared.course.errors import SettingError, nearest_multiples
from shared.parallel.comm.communicator import Communicator

Collective = Callable[[Tensor, Communicator], Tensor]


@exercise("07.f_and_g")
def f_and_g(group: Communicator) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Make Megatron's operators f and g for a group of ranks (Shoeybi et al. 2019, section 3, figure 3).

    Autograd does not see what a group's collectives do, so each operator states its own derivative:

        y = f(x)    all ranks have the same x, and each computes another part of what follows: heads, features or tokens. So the gradient
                    of x is the sum of what the ranks' parts send back.
        y = g(x)    each rank has another x, and all ranks continue with the sum, in the same way. So every rank has the whole gradient of
                    that sum already, and the sum's derivative by this rank's x is 1.

    In Megatron's block f stands in front of matrices that are cut by columns, g behind one that is cut by rows: one all-reduce for each
    sublayer in the forward pass, and one in the backward pass.

    Args:
        group: the tensor-parallel ranks. `group.all_reduce(tensor)` replaces a contiguous tensor by the sum over the ranks, in place.

    Returns:
        f and g: functions of one tensor, of any shape and dtype, contiguous or not, which return a tensor of the same shape and dtype.
        Neither changes its argument, nor the gradient that arrives from behind it. Both are called many times, and in any order.

    >>> f, g = f_and_g(SingleRankCommunicator())
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> (3 * g(2 * f(x))).sum().backward()
    >>> x.grad
    tensor([6., 6.])
    """


def all_gathered(part: Tensor, group: Communicator) -> Tensor:
    """[batch, seq / ranks, ...] of each rank -> [batch, seq, ...]."""
    rows = part.new_empty(group.size, *part.shape)
    group.all_gather(rows, part.contiguous())
    return rows.transpose(0, 1).flatten(1, 2)


def reduce_scattered(whole: Tensor, group: Communicator) -> Tensor:
    """[batch, seq, ...] -> this rank's slice of the sum over the group, [batch, seq / ranks, ...]."""
    rows = whole.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    part = rows.new_empty(rows.shape[1:])
    group.reduce_scatter(part, rows)
    return part


def own_slice(whole: Tensor, group: Communicator) -> Tensor:
    """[batch, seq, ...] -> this rank's slice of the sequence, [batch, seq / ranks, ...]."""
    return whole.unflatten(1, (group.size, -1))[:, group.rank].contiguous()


def require_divisible(length: int, ranks: int) -> None:
    """Refuse a sequence that does not divide by the ranks, with the nearest lengths that do."""
    if length % ranks:
        raise SettingError(
            f"Sequence parallelism cuts the sequence over {ranks} ranks, and {length} positions do not divide by that: "
            f"give {nearest_multiples(length, ranks)}, or set parallel.sequence_parallel to false."
        )


def own_tokens(whole: Tensor, group: Communicator, sizes: Sequence[int]) -> Tensor:
    """[..., vocab] -> this rank's tokens, [..., sizes[rank]]."""
    return whole.split(list(sizes), dim=-1)[group.rank].contiguous()


def all_tokens(part: Tensor, group: Communicator, sizes: Sequence[int]) -> Tensor:
    """[..., sizes[rank]] of each rank -> [..., vocab]."""
    padded = part.new_zeros(*part.shape[:-1], max(sizes))
    padded[..., : part.shape[-1]] = part
    rows = part.new_empty(group.size, *padded.shape)
    group.all_gather(rows, padded)
    return torch.cat([row[..., :size] for row, size in zip(rows, sizes, strict=True)], dim=-1)


class Operator(torch.autograd.Function):
    """A collective whose backward pass is another one: both are functions (tensor, group) -> tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Collective, back: Collective, group: Communicator) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(upstream, ctx.group), None, None, None


def gather_sequence(part: Tensor, group: Communicator) -> Tensor:
    """[batch, seq / ranks, D] -> [batch, seq, D], the input of a sharded module."""
    return Operator.apply(part, all_gathered, reduce_scattered, group)


def scatter_sequence(whole: Tensor, group: Communicator) -> Tensor:
    """[batch, seq, D] -> this rank's positions of the sum over the ranks, [batch, seq / ranks, D]."""
    return Operator.apply(whole, reduce_scattered, all_gathered, group)


def split_sequence(whole: Tensor, group: Communicator) -> Tensor:
    """[batch, seq, D], the same on all ranks -> this rank's positions, [batch, seq / ranks, D]."""
    require_divisible(whole.shape[1], group.size)
    return Operator.apply(whole, own_slice, all_gathered, group)


def join_sequence(part: Tensor, group: Communicator) -> Tensor:
    """[batch, seq / ranks, D] -> [batch, seq, D], the input of a replicated module."""
    return Operator.apply(part, all_gathered, own_slice, group)


def join_vocabulary(part: Tensor, sizes: Sequence[int], group: Communicator) -> Tensor:
    """Logits [..., vocab of this rank] -> [..., vocab]. sizes: how many tokens each rank has."""
    return Operator.apply(part, partial(all_tokens, sizes=sizes), partial(own_tokens, sizes=sizes), group)
