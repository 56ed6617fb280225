"""Chapter 06. All-reduce from sends and receives: around a ring, every rank sends about twice the tensor, however many ranks there are.

    all-reduce = reduce-scatter, after which each rank holds one chunk of the sum, then all-gather, after which each holds all chunks

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Beside it stand the same result by way of
one rank, which is what the ring is measured against, and the split into two operations, on which ZeRO and FSDP are built.

Left out on purpose: trees and recursive halving, which need fewer steps for short tensors (Thakur, Rabenseifner and Gropp 2005), and
splitting chunks further so that sending and adding overlap. Training calls `Communicator.all_reduce`, which gloo or NCCL carry out.
"""

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.parallel.comm.communicator import Communicator


@exercise("06.ring_all_reduce")
def ring_all_reduce(tensor: Tensor, group: Communicator) -> None:
    """Every rank's `tensor` becomes the sum over the ranks, in place, by sends to one neighbour and receives from the other.

    Ranks form a ring: each sends to the next rank and receives from the one before, and the last one's next is rank 0. The tensor is cut
    into n chunks for n ranks, as equal as can be.

        reduce-scatter, n - 1 steps: send a chunk to the next rank; add the chunk that arrives to one's own numbers
        all-gather, n - 1 steps:     send a chunk that is the whole sum to the next rank; the one that arrives replaces one's own

    In each step all ranks send at once, each another chunk, and what a rank sends is what it completed in the step before. A send is over
    once the other side receives: if all ranks waited for that first, none would ever get to its receive.

    Args:
        tensor: contiguous, of any shape, dtype and length: also shorter than n, so that some chunks are empty. Ranks hold the same bits
            afterwards.
        group: the ranks that add up. `group.rank` of `group.size`; `send(tensor, to)` and `receive(tensor, source)` count ranks
            within the group, are done when they return, and with `asynchronous=True` once one calls `wait()` on what they return.

    It sends 2 (n - 1) times, each time one chunk (an empty one too) and straight from the tensor, and beside the tensor needs memory for
    one chunk. A group of one rank sends nothing.

    >>> def add_up(world):                                         # ranks hold 1, 10 and 100 times [0, 1, 2, 3]
    ...     tensor = 10.0**world.rank * torch.arange(4.0)
    ...     ring_all_reduce(tensor, world)
    ...     return tensor
    >>> run_threads(add_up, 3)[0]
    tensor([  0., 111., 222., 333.])

    The body stands in solutions/06_data_parallel.py; `course read shared.parallel.comm.collectives` shows it in place.
    """


def all_reduce_in_two(tensor: Tensor, group: Communicator) -> None:
    """All-reduce as a reduce-scatter and an all-gather: the same bytes, with a place between the two where each rank holds one part of
    the sum. ZeRO updates the weights there.

    Args:
        tensor: contiguous, of any shape; replaced by the sum over the ranks. What is missing to a multiple of the ranks is filled up by 0.
    """
    each = -(-tensor.numel() // group.size)
    whole = tensor.new_zeros(each * group.size)
    whole[: tensor.numel()] = tensor.view(-1)
    part = torch.empty_like(whole[:each])
    group.reduce_scatter(part, whole)
    group.all_gather(whole, part)
    tensor.view(-1).copy_(whole[: tensor.numel()])


def all_reduce_through_root(tensor: Tensor, group: Communicator) -> None:
    """All-reduce in the obvious way: everybody sends to rank 0, which adds up and sends the sum back to everybody.

    All of it passes through one rank, which receives n - 1 tensors and sends n - 1: the more ranks, the longer it takes.

    Args:
        tensor: contiguous, of any shape; replaced by the sum over the ranks.
    """
    if group.rank:
        group.send(tensor, to=0)
        group.receive(tensor, source=0)
        return
    arrived = torch.empty_like(tensor)
    for source in range(1, group.size):
        group.receive(arrived, source)
        tensor += arrived
    for to in range(1, group.size):
        group.send(tensor, to)
