"""Chapter 06. Reduce-scatter and all-gather over gloo by shorter ways than its own: each rank hands every other rank its piece directly.

    short (under 4 MiB)   one all-to-all
    long                  a send to and a receive from each other rank, straight from and into the place where the numbers belong

gloo's own reduce-scatter and all-gather make more passes over memory than their bytes need: two to three times the milliseconds of these,
and they cost together about three all-reduces. `tests/benchmarks/gloo_routes.py` has measured every route that we know.

Left out on purpose: many machines, where n - 1 messages at once crowd the network; NCCL, whose own routes are the best there are; and
all-reduce, which gloo does well.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

LONG = 2**22  # bytes of the whole tensor; sends and receives have to be waited for one by one, which short tensors are not worth
WaitFor = Callable[[dist.Work, bool], None]  # waits for an operation; the flag says whether it is a send or a receive
TAG = 6  # so that they are never taken for a send of the group's users


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup, wait_for: WaitFor) -> Callable[[], None]:
    """Begin to add up this rank's row over the ranks: in rank order, so that the bits are always the same.

    Args:
        part: [n], for the sum; it may be this rank's row of `whole`.
        whole: [size * n], a row for each rank. Left as it is; beside it stands a second one of its size until the end.
        wait_for: how the group's communicator waits.

    Returns:
        What waits until all rows are here, and adds them up.
    """
    rows, rank = whole.view(group.size(), -1), group.rank()
    arrived = torch.empty_like(rows)
    if whole.nbytes < LONG:
        work = dist.all_to_all_single(arrived, rows, group=group, async_op=True)
        wait = partial(wait_for, work, False)
    else:
        wait = exchange(rows, arrived, group, wait_for)

    def finish() -> None:
        wait()
        first, *others, last = [*arrived[:rank], rows[rank], *arrived[rank + 1 :]]
        for row in others:
            first = torch.add(first, row, out=arrived[0])
        torch.add(first, last, out=part.view(-1))

    return finish


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup, wait_for: WaitFor) -> Callable[[], None]:
    """Begin to hand `part` to every rank.

    Args:
        whole: [size * n], for the ranks' parts, one after the other.
        part: [n]; it may be its own place in `whole`.
        wait_for: how the group's communicator waits.

    Returns:
        What waits until `whole` is complete. Until then `part` must be left alone.
    """
    rows, part = whole.view(group.size(), -1), part.view(-1)
    if whole.nbytes < LONG:
        work = dist.all_to_all_single(rows, part.repeat(len(rows), 1), group=group, async_op=True)
        return partial(wait_for, work, False)
    wait = exchange([part] * len(rows), rows, group, wait_for)
    if rows[group.rank()].data_ptr() != part.data_ptr():
        rows[group.rank()].copy_(part)
    return wait


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup, wait_for: WaitFor) -> Callable[[], None]:
    """Begin to send `sent[r]` to each other rank r, and to receive `received[r]` from it. Returns what waits for all of them."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [dist.irecv(received[rank], group=group, group_src=rank, tag=TAG) for rank in others]
    works += [dist.isend(sent[rank], group=group, group_dst=rank, tag=TAG) for rank in others]

    def wait() -> None:
        for work in works:
            wait_for(work, True)

    return wait
