"""Chapter 09. Differentiable all-to-all for expert parallelism: rows travel to their experts' ranks, and gradients the same way back.

Every rank sends each other rank as many rows as the router decided, perhaps none, and the ranks know only what they send. So the numbers
travel first, in an all-to-all of their own, and the host waits for them once: the second all-to-all needs the sizes of what arrives. A
rank that sends and receives nothing calls both all the same, because the others wait for it (Lepikhin et al. 2020, GShard, section 3.2).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.parallel.comm.communicator import Communicator


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """Send each rank its rows, and receive this rank's from every rank: an all-to-all with uneven splits, and its backward pass.

    Args:
        rows: [sum(sent), D], sorted by the rank that they go to.
        sent: how many of them go to each rank of the group, this one included; may be 0.
        received: how many come from each rank.
        group: the ranks that exchange rows; all of them call it, also one with nothing to send or to receive.

    Returns:
        [sum(received), D], the rows from rank 0 first, each rank's in the order in which it sent them.

    >>> exchange_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [2], [2], SingleRankCommunicator())
    tensor([[1., 2.],
            [3., 4.]])
    """
    return ExchangeRows.apply(rows, sent, received, group)


class ExchangeRows(torch.autograd.Function):
    """Each row is somewhere else afterwards and stays what it is, so its gradient comes back by the way on which the row went."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(upstream, ctx.received, ctx.sent, ctx.group), None, None, None


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """`exchange_rows` without autograd."""
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    group.all_to_all(arriving.split(received), rows.contiguous().split(sent))
    return arriving


def exchange_counts(counts: Tensor, group: Communicator) -> tuple[list[int], list[list[int]], Tensor]:
    """Tell each rank how many rows its experts get from here: one all-to-all of whole numbers, and one wait of the host.

    Args:
        counts: [E] int64, how many of this rank's rows go to each expert; rank 0 of the group holds the first E / size of them.
        group: the ranks over which the experts are spread.

    Returns:
        sent: how many rows this rank sends to each rank.
        received: received[r] are the rows that rank r sends to each of this rank's experts.
        own: [E / size] int64 on the device of `counts`, how many rows each of this rank's experts gets.
    """
    here = counts.view(group.size, -1)
    there = torch.empty_like(here)
    group.all_to_all(there.unbind(), here.unbind())
    sent, received = torch.stack([here, there]).tolist()
    return [sum(row) for row in sent], received, there.sum(dim=0)
