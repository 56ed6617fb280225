"""Chapter 06. Faster reduce-scatter and all-gather for gloo: each rank sends its shards directly to every other rank.

    short (under 4 MiB)   one all-to-all
    long                  a send to and a receive from each other rank, straight from and into the tensors themselves

gloo's own reduce-scatter and all-gather make more passes over memory than their bytes need: they take two to three times as long as these.
`tests/benchmarks/gloo_routes.py` measures them beside other algorithms.

Left out on purpose: many machines, where n - 1 messages at once congest the network; NCCL, which has better algorithms of its own; and
all-reduce, which gloo does well.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

LONG = 2**22  # bytes of the full tensor; sends and receives block one by one, which does not pay for short tensors
WaitFor = Callable[[dist.Work, bool], None]  # waits for an operation; the flag says whether it is a send or a receive
COMMUNICATORS: WeakSet[Any] = WeakSet()  # every communicator of this process that has not been collected
TAG = 6  # keeps these messages apart from the sends of a group's users


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup, wait_for: WaitFor) -> Callable[[], None]:
    """Start a reduce-scatter: the sum of this rank's row over the ranks, added in rank order, so that the bits are always the same.

    Args:
        part: [n], for the sum; it may be this rank's row of `whole`.
        whole: [size * n], a row for each rank. Left unchanged; a buffer of its size is allocated until the end.
        wait_for: waits for an operation, with the heartbeat of the group's communicator.

    Returns:
        A function that waits until all rows have arrived, and adds them up.
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
    """Start an all-gather of `part`.

    Args:
        whole: [size * n], for the ranks' parts, one after the other.
        part: [n]; it may be its own slice of `whole`.
        wait_for: waits for an operation, with the heartbeat of the group's communicator.

    Returns:
        A function that waits until `whole` is complete. Do not write to `part` before.
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
    """Start to send `sent[r]` to each other rank r, and to receive `received[r]` from it. Returns a function that waits for all of them."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [dist.irecv(received[rank], group=group, group_src=rank, tag=TAG) for rank in others]
    works += [dist.isend(sent[rank], group=group, group_dst=rank, tag=TAG) for rank in others]

    def wait() -> None:
        for work in works:
            wait_for(work, True)

    return wait


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as one, [numbers]: a view where they already lie one after the other, as the parts of a split do; else a copy."""
    filled = [tensor for tensor in tensors if tensor.numel()] or [tensors[0]]
    first, place = filled[0], filled[0].storage_offset()
    for tensor in filled:
        if (tensor.untyped_storage().data_ptr(), tensor.storage_offset()) != (first.untyped_storage().data_ptr(), place):
            return torch.cat([tensor.flatten() for tensor in tensors])
        place += tensor.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))


def end_threads() -> None:
    """End gloo's threads before the interpreter exits. A thread may still hold the tensor of its last operation; releasing it needs the
    interpreter, and without one the process aborts (pytorch/pytorch issue 190489), as seen on busy machines."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        for communicator in COMMUNICATORS:
            communicator.torch_group = None  # with the last reference to a group its threads end
        dist.destroy_process_group()
