"""Chapter 06. DDP, data parallelism: every rank has the whole model and its own share of the batch; gradient buckets are all-reduced.

    gradient of the loss sum over the batch = sum over ranks of (gradient of the loss sum over the rank's share)

Gradients are added and never averaged; the updater divides once, by the token count of all ranks, so shares may be uneven. `DataParallel`
overlaps the exchange with the backward pass of earlier layers (Li et al. 2020, "PyTorch Distributed", section 3.2).

Gradients travel in buckets: many in one collective, because one for each tensor is mostly latency.

    flat   [a a a a a a | b b b | c c c c]         one all-reduce for a, b and c

Which parameters share a bucket is read off the model alone, so every rank has the same buckets in the same order, and a resumed run has
them too. PyTorch rebuilds its buckets in the order that the first step shows; a resumed run would then sum in a different order from an
uninterrupted one, and a transformer's gradients become ready in nearly the reverse of parameter registration order anyway.

Left out on purpose: buffers (such as batch norm's), which stay each rank's own; and a wrapper around the model, which exchanges nothing
where the module inside is called directly. Here the parameters have hooks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.model.sharding import part_sizes
from shared.parallel.comm.communicator import Communicator
from shared.parallel.comm.trace import Work
from shared.parallel.data.engine import DataEngine
from shared.totals import Batch, Objective, Runner, Totals

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


@exercise("06.sync_buckets")
def sync_buckets(buckets: Sequence[Bucket]) -> Callable[[], None]:
    """Overlap the gradient all-reduce with the next backward pass: start each bucket as soon as possible.

    It is called before the forward pass of a step's last micro-batch. A bucket is full once each of its parameters has its gradient of that
    pass, added to those of earlier micro-batches. At that moment autograd calls what was registered with
    `parameter.register_post_accumulate_grad_hook(function)`, as function(parameter). `parameter.grad` may hold earlier micro-batches'
    gradients already, so that it is set does not say that this pass has come by.

    Ranks may have their gradients in different orders, yet must start the same operations in the same order. So bucket 0 starts
    first, then bucket 1, and so on: a bucket that is full waits until those before it have started, and then starts at once.

    A parameter that the pass did not use calls no hook. What is not full when the pass is over starts in `finish`, in order.

    Args:
        buckets: the same ones in the same order on every rank; no parameter is in two. `bucket.parameters` are its parameters;
            `bucket.start()` takes their gradients as they are at that moment and starts to add them over the ranks, without waiting.
            It returns the work of that operation, whose `wait()` completes the sums.

    Returns:
        finish: to be called once, without arguments, after the backward pass. Then every bucket has started once and was waited for,
        and no hook is left, so that later passes exchange nothing.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> (5 * weight).sum().backward()                              # an earlier micro-batch
    >>> finish = sync_buckets([SummedBucket([weight], SingleRankCommunicator())])
    >>> (2 * weight).sum().backward()                              # the last one: the bucket starts in here, with 5 + 2
    >>> finish()
    >>> weight.grad
    tensor([7.])
    """


class NaiveDataParallel(DataEngine):
    """Naive DDP: after the backward pass, gradients are all-reduced one after the other.

    Args:
        model: the same weights on every rank, with untrained parameters frozen already.
        group: the ranks that share a batch.
    """

    def __init__(self, model: nn.Module, group: Communicator):
        super().__init__(model, group)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.flags: list[bool] = [False] * len(self.trained)

    def finish(self) -> None:
        """All-reduce every gradient; a parameter that this rank has not used counts as 0."""
        self.flags = [parameter.grad is not None for parameter in self.trained]
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            self.group.all_reduce(parameter.grad)

    def used(self) -> Tensor:
        return torch.tensor(self.flags, dtype=torch.float64)

    def drop_unused(self, users: Sequence[float]) -> None:
        for parameter, count in zip(self.trained, users, strict=True):
            if not count:
                parameter.grad = None


class DataParallel(DataEngine):
    """DDP with gradient buckets, overlapped with the backward pass: a bucket is all-reduced as soon as its gradients are complete.

    Args:
        model: the same weights on every rank, with untrained parameters frozen already.
        group: the ranks that share a batch.
        bucket_megabytes: the size of a bucket of gradients. Large buckets have less latency in all, small ones start sooner.

    Attributes:
        buckets: in the order in which they start on every rank: the last layers first, as in the backward pass.
    """

    def __init__(self, model: nn.Module, group: Communicator, bucket_megabytes: float = 25.0):
        super().__init__(model, group)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = self.make_buckets(plan_buckets(reversed(trained), bucket_megabytes))
        self.under_way: Callable[[], None] | None = None

    def make_buckets(self, plan: Sequence[Sequence[nn.Parameter]]) -> list[Bucket]:
        return [SummedBucket(parameters, self.group) for parameters in plan]

    def begin(self, passes: int) -> None:
        """Start to exchange gradients in the last of `passes` backward passes, when gradients of all of them have been accumulated."""
        self.finish_exchange()
        self.group.trace.phase = "backward"
        self.under_way = sync_buckets(self.buckets if passes == 1 else [LastPass(bucket, passes) for bucket in self.buckets])

    def runner(self, runner: Runner) -> Runner:
        """Wrap the runner, and keep its order of backward passes, which may be a pipeline's schedule."""

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            self.begin(len(microbatches))
            return runner(model, microbatches, objective)

        return run

    def finish_exchange(self) -> None:
        """Complete the exchange under way, if there is one."""
        self.group.trace.phase = "after backward"
        finish, self.under_way = self.under_way, None
        if finish is not None:
            finish()

    def finish(self) -> None:
        """Complete the exchange of this step, also where the runner started none."""
        self.under_way = self.under_way or sync_buckets(self.buckets)
        self.finish_exchange()

    def used(self) -> Tensor:
        return torch.tensor([flag for bucket in self.buckets for flag in bucket.used], dtype=torch.float64)

    def drop_unused(self, users: Sequence[float]) -> None:
        counts = iter(users)
        for bucket in self.buckets:
            bucket.used[:] = [False] * len(bucket.used)
            for result in bucket.results:
                if not next(counts):
                    result.grad = None


class LastPass:
    """A bucket that is exchanged once for all micro-batches: its parameters call their hooks in the last of several backward passes only.

    A parameter that some micro-batch did not use has fewer passes; its bucket starts when the step is finished.
    """

    def __init__(self, bucket: Bucket, passes: int):
        self.start = bucket.start
        self.parameters = [CountedParameter(parameter, passes) for parameter in bucket.parameters]


class CountedParameter:
    """Acts as a parameter in `sync_buckets`, and calls its hook in the last pass only."""

    def __init__(self, parameter: nn.Parameter, passes: int):
        self.parameter, self.remaining = parameter, passes

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        def count(parameter: nn.Parameter) -> None:
            self.remaining -= 1
            if self.remaining == 0:
                hook(self)

        return self.parameter.register_post_accumulate_grad_hook(count)
