"""Chapter 06. Reduce-scatter and all-gather of parts that need not be equal: a matrix that one rank is to have whole has no equal parts.

Where parts are equal but for the last number of some, they are filled up and the operations of that name do it. Else an all-to-all carries
just the numbers that are needed, and whoever receives them adds them up: the same bytes, without padding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator, Waiting, Work


def are_equal(sizes: Sequence[int]) -> bool:
    """Whether parts of these sizes are as equal as can be, so that filling them up costs less than one number a rank."""
    return max(sizes) - min(sizes) <= 1


def reduce_parts(parts: Sequence[Sequence[Tensor]], group: Communicator, keep: Callable[[Tensor], None]) -> Work:
    """Begin to add up over the ranks what each of them is to keep.

    Args:
        parts: parts[r] are this rank's numbers of what rank r keeps, tensors [n] laid end to end, at least one; sizes are the same on all
            ranks.
        keep: called with this rank's part of the sum [its size], once it has been waited for.
    """
    sizes = [sum(tensor.numel() for tensor in part) for part in parts]
    own, longest = sizes[group.rank], max(sizes)
    if are_equal(sizes):
        filled = [[*part, part[0].new_zeros(longest - size)] for part, size in zip(parts, sizes, strict=True)]
        whole = torch.cat([tensor for part in filled for tensor in part])
        total = whole.new_empty(longest)
        work = group.reduce_scatter(total, whole, asynchronous=True)
        return Waiting(lambda: (work.wait(), keep(total[:own])))
    sent = torch.cat([tensor for part in parts for tensor in part]).split(sizes)
    received = sent[0].new_empty(group.size, own)
    work = group.all_to_all(list(received), sent, asynchronous=True)
    return Waiting(lambda: (work.wait(), keep(received.sum(0))))


def gather_parts(part: Tensor, sizes: Sequence[int], group: Communicator, keep: Callable[[Sequence[Tensor]], None]) -> Work:
    """Begin to bring every rank's part to all of them.

    Args:
        part: this rank's, [sizes[group.rank]].
        keep: called with the parts of all ranks in order, [sizes[r]] each, once they have been waited for.
    """
    if are_equal(sizes):
        whole = part.new_empty(group.size, max(sizes))
        mine = whole[group.rank]
        mine[: len(part)], mine[len(part) :] = part, 0
        work = group.all_gather(whole, mine, asynchronous=True)
        return Waiting(lambda: (work.wait(), keep([row[:size] for row, size in zip(whole, sizes, strict=True)])))
    received = [part.new_empty(size) for size in sizes]
    work = group.all_to_all(received, [part] * group.size, asynchronous=True)
    return Waiting(lambda: (work.wait(), keep(received)))
