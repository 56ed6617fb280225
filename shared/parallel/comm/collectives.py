"""Chapter 06. Collectives built from other operations: ring all-reduce, and reduce-scatter and all-gather of shards of unequal size.

    all-reduce = reduce-scatter, after which each rank holds one chunk of the sum, then all-gather, after which each holds all chunks

Ring all-reduce: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Each rank sends about
twice the tensor's size, regardless of the number of ranks.

`reduce_scatter_v` and `all_gather_v` take a size per rank, as MPI's Reduce_scatter and Allgatherv do: Muon needs whole matrices, which do
not divide into equal shards. Sizes that differ by one at most are padded; otherwise an all-to-all carries just the numbers needed.

Left out on purpose: trees and recursive halving, which need fewer steps for short tensors (Thakur, Rabenseifner and Gropp 2005), and
splitting chunks further so that sending and adding overlap. Training calls `Communicator.all_reduce`, which gloo or NCCL carry out.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work


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
        group: the ranks that add up. `group.rank` of `group.size`; `send(tensor, to)` and `receive(tensor, source)`, which writes what
            arrives into `tensor`, count ranks within the group, are done when they return, and with `asynchronous=True` once one calls
            `wait()` on what they return.

    It sends 2 (n - 1) times, each time one chunk (an empty one too) and straight from the tensor, and beside the tensor needs memory for
    one chunk. A group of one rank sends nothing.

    >>> def add_up(world):                                         # ranks hold 1, 10 and 100 times [0, 1, 2, 3]
    ...     tensor = 10.0**world.rank * torch.arange(4.0)
    ...     ring_all_reduce(tensor, world)
    ...     return tensor
    >>> run_threads(add_up, 3)[0]
    tensor([  0., 111., 222., 333.])
    """


def are_equal(sizes: Sequence[int]) -> bool:
    """Whether sizes differ by one at most, so that padding costs less than one element for each rank."""
    return max(sizes) - min(sizes) <= 1


def reduce_scatter_v(parts: Sequence[Sequence[Tensor]], group: Communicator, keep: Callable[[Tensor], None]) -> Work:
    """Start a reduce-scatter with a size for each rank (MPI's Reduce_scatter): each rank gets its own part of the sum over the ranks.

    Args:
        parts: parts[r] are this rank's summands of rank r's part, as tensors [n] laid end to end, at least one; sizes are the same on all
            ranks.
        keep: called with this rank's part of the sum [its size] by the work's `wait`.
    """
    sizes = [sum(tensor.numel() for tensor in part) for part in parts]
    own, longest = sizes[group.rank], max(sizes)
    if are_equal(sizes):
        padded = [[*part, part[0].new_zeros(longest - size)] for part, size in zip(parts, sizes, strict=True)]
        whole = torch.cat([tensor for part in padded for tensor in part])
        total = whole.new_empty(longest)
        work = group.reduce_scatter(total, whole, asynchronous=True)
        return Work(lambda: (work.wait(), keep(total[:own])))
    sent = torch.cat([tensor for part in parts for tensor in part]).split(sizes)
    received = sent[0].new_empty(group.size, own)
    work = group.all_to_all(list(received), sent, asynchronous=True)
    return Work(lambda: (work.wait(), keep(received.sum(0))))


def all_gather_v(part: Tensor, sizes: Sequence[int], group: Communicator, keep: Callable[[Sequence[Tensor]], None]) -> Work:
    """Start an all-gather with a size for each rank (MPI's Allgatherv): every rank gets the parts of all ranks.

    Args:
        part: this rank's part, [sizes[group.rank]].
        sizes: the number of elements of each rank's part.
        keep: called with the parts of all ranks in order, [sizes[r]] each, by the work's `wait`.
    """
    if are_equal(sizes):
        whole = part.new_empty(group.size, max(sizes))
        mine = whole[group.rank]
        mine[: len(part)], mine[len(part) :] = part, 0
        work = group.all_gather(whole, mine, asynchronous=True)
        return Work(lambda: (work.wait(), keep([row[:size] for row, size in zip(whole, sizes, strict=True)])))
    received = [part.new_empty(size) for size in sizes]
    work = group.all_to_all(received, [part] * group.size, asynchronous=True)
    return Work(lambda: (work.wait(), keep(received)))
