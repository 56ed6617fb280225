"""Solutions of chapter 06. Each body with the reason why it is written this way."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.parallel.data.ddp import Bucket
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work
from shared.model.sharding import Range
from shared.parallel.data.activation_checkpointing import random_numbers_from


# Collectives


def ring_all_reduce(tensor: Tensor, group: Communicator) -> None:
    """A rank passes on what it has just completed, so the chunk's number falls by one in every step, through both phases: after n - 1
    steps of adding, the chunk that is whole is the very one that comes next. The first chunk is the longest, so the buffer fits all."""
    n, rank = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(n)
    buffer = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        leaving, arriving = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        adding = step < n - 1
        place = buffer[: len(arriving)] if adding else arriving
        sending = group.send(leaving, to=(rank + 1) % n, asynchronous=True)
        group.receive(place, source=(rank - 1) % n)
        sending.wait()
        if adding:
            arriving += place


# Replicas


def sync_buckets(buckets: Sequence[Bucket]) -> Callable[[], None]:
    """The list of what has started says by its length which bucket is next, so none can start early, late or twice. Hooks that are made
    for one pass and removed after it need no switch that somebody could forget."""
    missing = [set(bucket.parameters) for bucket in buckets]
    started: list[Work] = []

    def note(parameter: nn.Parameter) -> None:
        for parameters in missing:
            parameters.discard(parameter)
        while len(started) < len(buckets) and not missing[len(started)]:
            started.append(buckets[len(started)].start())

    hooks = [parameter.register_post_accumulate_grad_hook(note) for bucket in buckets for parameter in bucket.parameters]

    def finish() -> None:
        for hook in hooks:
            hook.remove()
        started.extend(bucket.start() for bucket in buckets[len(started) :])
        for work in started:
            work.wait()

    return finish


def partition(sizes: Sequence[int], whole: Sequence[bool], held: Sequence[int]) -> list[list[Range]]:
    """Like pouring water over stones: what can be cut flows to the lowest ranks until they stand at one level. The level is the mean of
    the k lowest, for the largest k whose highest rank does not stick out of it."""
    held, ranks = list(held), len(held)
    ranges = [[(0, 0)] * ranks for _ in sizes]
    for number in sorted((number for number, stays in enumerate(whole) if stays), key=lambda number: -sizes[number]):
        rank = held.index(min(held))
        ranges[number][rank] = (0, sizes[number])
        held[rank] += sizes[number]

    left = sum(size for size, stays in zip(sizes, whole, strict=True) if not stays)
    low = sorted(range(ranks), key=held.__getitem__)
    while left + sum(held[rank] for rank in low) < len(low) * held[low[-1]]:
        low.pop()
    level, more = divmod(left + sum(held[rank] for rank in low), len(low))
    room = [0] * ranks
    for place, rank in enumerate(low):
        room[rank] = level + (place < more) - held[rank]

    for number, (size, stays) in enumerate(zip(sizes, whole, strict=True)):
        start = 0
        for rank in range(ranks) if not stays else ():
            stop = min(size, start + room[rank])
            ranges[number][rank] = (start, stop)
            room[rank] -= stop - start
            start = stop
    return ranges


# Activation checkpointing and FSDP.


def recompute(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    upstream: Tensor,
    random_state: list[Tensor],
) -> tuple[Tensor | None, ...]:
    """The inputs are detached, so the new graph ends at them: the old one goes on from there when this returns. `autograd.grad` hands the
    gradients back in place of adding them to `.grad`, where a hook would see them before those of other uses are in."""
    with random_numbers_from(random_state), torch.enable_grad():
        fresh = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        output = run(*fresh)
    tensors = [*fresh, *parameters]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not output.requires_grad:  # it depends on nothing that wants a gradient, and autograd refuses such an output
        return (None,) * len(tensors)
    gradients = iter(torch.autograd.grad(output, wanted, upstream, allow_unused=True))
    return tuple(next(gradients) if tensor.requires_grad else None for tensor in tensors)


def unshard_unit(whole: Tensor, shard: Tensor, group: Communicator) -> Work:
    """The shard is rounded straight into its own place in the whole, from which it is gathered: no copy of it besides, and half the bytes
    travel where the whole has half the width."""
    whole.untyped_storage().resize_(whole.numel() * whole.element_size())
    mine = whole.view(group.size, -1)[group.rank]
    mine.copy_(shard)
    return group.all_gather(whole, mine, asynchronous=True)


def reshard_unit(
    whole: Tensor, gradients: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype, group: Communicator
) -> tuple[Tensor, Work]:
    """The weights go first, so that they are not held beside the buffer of their gradients. Zeros stand for what was not used, and for the
    padding: every rank sends the same places."""
    whole.untyped_storage().resize_(0)
    flat = torch.zeros(whole.numel(), dtype=dtype, device=whole.device)
    for place, gradient in zip(flat[: sum(sizes)].split(list(sizes)), gradients, strict=True):
        if gradient is not None:
            place.copy_(gradient.flatten())
    shard = torch.empty(len(flat) // group.size, dtype=dtype, device=whole.device)
    return shard, group.reduce_scatter(shard, flat, asynchronous=True)
