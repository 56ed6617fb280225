"""Chapter 06. Gradient buckets (DDP buckets): many gradients in one collective, because one for each tensor is mostly latency.

    flat   [a a a a a a | b b b | c c c c]         one all-reduce for a, b and c

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2. Which parameters share a bucket is
read off the model alone, so every rank has the same buckets in the same order, and a resumed run has them too.

Left out on purpose: buckets rebuilt in the order that the first step shows, as PyTorch does. A resumed run would then sum in a different
order from an uninterrupted one; besides, a transformer's gradients become ready in nearly the reverse of parameter registration order.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from shared.parallel.comm.communicator import Communicator, Work
from shared.parallel.sharding import part_sizes

MEBIBYTE = 2**20


class Bucket(Protocol):
    """A bucket: parameters whose gradients are exchanged in one collective.

    parameters: in the order in which they lie in the bucket.
    results: the parameters that receive the reduced gradients, one for each; the same objects if nothing is sharded.
    used: whether this rank has brought a gradient of each, in this step.
    bytes: the bytes that are exchanged, with padding.
    """

    parameters: Sequence[nn.Parameter]
    results: Sequence[nn.Parameter]
    used: list[bool]
    bytes: int

    def start(self) -> Work:
        """Take the gradients as they are now, and start to add them over the ranks; `wait()` of the returned work completes it."""


class SummedBucket:
    """A bucket for all-reduce, in place: the gradients become views of the bucket.

    A gradient's own memory is freed as soon as its bucket has started, so at most one bucket is allocated in addition to the gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Communicator):
        self.parameters = self.results = tuple(parameters)
        self.used, self.group = [False] * len(self.parameters), group
        self.bytes = sum(parameter.nbytes for parameter in self.parameters)

    def start(self) -> Work:
        flat = torch.cat([gradient.reshape(-1) for gradient in take_gradients(self)])
        for parameter, part in zip(self.parameters, flat.split([each.numel() for each in self.parameters]), strict=True):
            parameter.grad = part.view(parameter.shape)
        return self.group.all_reduce(flat, asynchronous=True)


def take_gradients(bucket: Bucket) -> list[Tensor]:
    """Move the gradients out of a bucket's parameters; zeros for parameters that this rank has not used, since other ranks may have."""
    gradients = []
    for number, parameter in enumerate(bucket.parameters):
        bucket.used[number] |= parameter.grad is not None
        gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return gradients


def plan_buckets(parameters: Iterable[nn.Parameter], megabytes: float) -> list[list[nn.Parameter]]:
    """Assign parameters to buckets of at most so many MiB, of one dtype and device each; a larger parameter gets a bucket of its own.

    Args:
        parameters: in the order in which their gradients are expected.
    """
    closed: list[list[nn.Parameter]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket = open_ones.setdefault(kind, [])
        if sum(max(part_sizes(each)) for each in (*bucket, parameter)) * parameter.element_size() > megabytes * MEBIBYTE and bucket:
            closed.append(open_ones.pop(kind))
            bucket = open_ones.setdefault(kind, [])
        bucket.append(parameter)
    return closed + list(open_ones.values())
