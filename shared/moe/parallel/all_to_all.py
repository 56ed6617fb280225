"""Chapter 09. Differentiable all-to-all for expert parallelism: rows travel to their experts' ranks, and gradients the same way back.

Every rank sends each other rank as many rows as the router decided, perhaps none, and the ranks know only what they send. So the numbers
travel first, in an all-to-all of their own, and the host waits for them once: the second all-to-all needs the sizes of what arrives. A
rank that sends and receives nothing calls both all the same, because the others wait for it (Lepikhin et al. 2020, GShard, section 3.2).

On PyTorch's backend the rows take its own differentiable all-to-all (`all_to_all_single_autograd` of its functional collectives), whose
result blocks where it is first used, so that exchange has no two halves. The replicas' DDP leaves experts alone: their gradients
are added over fewer ranks, by this course's engine.

Left out on purpose: PyTorch's exchanges in the communication trace, where they do not appear; experts beside `fully_shard`, whose every
parameter is on one mesh.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shared.course.binding import exercise
from shared.parallel.comm.communicator import Communicator


@exercise("09.exchange_rows")
def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """Send each rank its rows, and receive this rank's from every rank: an all-to-all with uneven splits, and its backward pass.

    A row has the same numbers afterwards, on another rank. Autograd does not see what a group's collectives do, so the function states its
    own derivative. The loss is the sum of all ranks' losses. The gradient of a row is computed on the rank that received the row, and the
    rank that sent it needs it.

        - The forward pass calls `group.all_to_all(there, here)` once, and the backward pass once more. It fills the tensor there[r] with
          what rank r gives as here[this rank]. Both are one contiguous tensor for each rank, all of one dtype; a tensor may be empty. Each
          pass sends every row once and nothing else, and copies no rows that lie together already.
        - Every rank of the group takes part in both passes, also one that sends nothing or receives nothing: the others wait for it.
        - Neither `rows` nor the incoming gradient is changed. Both may be non-contiguous. Between the passes no rows are
          kept: a backward pass needs none.

    Args:
        rows: [sum(sent), D] of any dtype, sorted by the rank that they go to.
        sent: how many of them go to each rank of the group, this one included; may be 0.
        received: how many come from each rank.
        group: the ranks that exchange rows.

    Returns:
        [sum(received), D] in the dtype of `rows`: the rows from rank 0 first, each rank's in the order in which it sent them.

    >>> exchange_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [2], [2], SingleRankCommunicator())
    tensor([[1., 2.],
            [3., 4.]])
    """


def begin_exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> tuple[Tensor, "RowExchange"]:
    """Start `exchange_rows` without waiting: what is computed until the exchange is finished hides it, here and in the backward pass.

    Args:
        As for `exchange_rows`.

    Returns:
        [sum(received), D], not to be read yet, and the exchange, whose `finish` takes that and returns it once the rows have arrived.
    """
    exchange = RowExchange(sent, received, group)
    return BeginExchange.apply(rows, exchange), exchange


class RowExchange:
    """Rows on their way between ranks; later, their gradients on the way back.

    In the backward pass `FinishExchange` starts to send the gradients. Autograd runs the node that was made last first, then everything
    that was computed in between, and at the end `BeginExchange`, which waits for them.
    """

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: Communicator):
        self.sent, self.received, self.group = sent, received, group

    def begin(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.arriving = rows.new_empty(sum(received), *rows.shape[1:])
        self.work = self.group.all_to_all(self.arriving.split(received), rows.contiguous().split(sent), asynchronous=True)
        return self.arriving

    def wait(self) -> Tensor:
        self.work.wait()
        arrived, self.arriving, self.work = self.arriving, None, None
        return arrived

    def finish(self, rows: Tensor) -> Tensor:
        return FinishExchange.apply(rows, self)


class BeginExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, exchange.sent, exchange.received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """`upstream` is what `FinishExchange` was given; the gradients that replace it are on their way."""
        return ctx.exchange.wait(), None


class FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(upstream, ctx.exchange.received, ctx.exchange.sent)
        return upstream, None


def exchange_counts(counts: Tensor, group: Communicator) -> tuple[list[int], list[list[int]], Tensor]:
    """Exchange how many rows the experts of each rank get from here: one all-to-all of integers, and one host synchronization.

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


def exchange_rows_by_torch(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Communicator) -> Tensor:
    """What `shared.moe.parallel.all_to_all.exchange_rows` does."""
    return all_to_all_single_autograd(rows, list(received), list(sent), group.torch_group)
