"""Chapter 06. Data parallelism: every rank has the whole model and its own share of the batch, and gradients add up over the ranks.

    gradient of the loss sum over the batch = sum over ranks of (gradient of the loss sum over the rank's share)

Gradients are added and never averaged; the updater divides once, by the token count of all ranks, so shares may be uneven. `DataParallel`
exchanges them while the backward pass is still at work on earlier layers (Li et al. 2020, "PyTorch Distributed", section 3.2).

Left out on purpose: buffers (such as batch norm's), which stay each rank's own; and a wrapper around the model, which exchanges nothing
where somebody calls the module inside. Here hooks hang on the parameters.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.course.binding import exercise
from shared.optim.clipping import model_gradient_norm
from shared.parallel.data.buckets import Bucket, SummedBucket, plan_buckets
from shared.parallel.comm.communicator import Communicator
from shared.parallel.sharding import Cut
from shared.parallel.run_world import add_with
from shared.totals import Batch, Objective, Runner, Totals, Updater, add_totals


@exercise("06.sync_buckets")
def sync_buckets(buckets: Sequence[Bucket]) -> Callable[[], None]:
    """Exchange gradients during the next backward pass: each bucket as soon as it can be.

    It is called before the forward pass of a step's last micro-batch. A bucket is full once each of its parameters has its gradient of that
    pass, added to those of earlier micro-batches: it calls what was given to `parameter.register_post_accumulate_grad_hook(function)`, with
    the parameter.

    Ranks may have their gradients in different orders, yet must begin the same operations in the same order. So bucket 0 starts
    first, then bucket 1, and so on: a bucket that is full waits until those before it have started, and then starts at once.

    A parameter that the pass did not use calls no hook. What is not full when the pass is over starts in `finish`, in order.

    Args:
        buckets: the same ones in the same order on every rank; no parameter is in two. `bucket.parameters` are its parameters;
            `bucket.start()` takes their gradients as they are at that moment and begins to add them up over the ranks, without waiting.
            It returns an operation under way, whose `wait()` completes the sums.

    Returns:
        finish: to be called once, without arguments, after the backward pass. Then every bucket has started once and is waited for,
        and no hook is left, so that later passes exchange nothing.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> (5 * weight).sum().backward()                              # an earlier micro-batch
    >>> finish = sync_buckets([SummedBucket([weight], SingleRankCommunicator())])
    >>> (2 * weight).sum().backward()                              # the last one: the bucket starts in here, with 5 + 2
    >>> finish()
    >>> weight.grad
    tensor([7.])

    The body stands in solutions/06_data_parallel.py; `course read shared.parallel.data.ddp` shows it in place.
    """


class NaiveDataParallel:
    """Data parallelism as one would first write it: when backward is over, the gradients are added up one after the other.

    Args:
        model: the same weights on every rank. What is not to be trained is frozen already.
        group: the ranks that share out a batch.
    """

    def __init__(self, model: nn.Module, group: Communicator):
        self.model = self.optimized = model
        self.group = group
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def runner(self, runner: Runner) -> Runner:
        return runner

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        """Totals and gradients over all ranks. A parameter that only some ranks have used counts as 0 on the others; one that none has
        used keeps no gradient. How many have used it travels with the totals."""
        used = torch.tensor([parameter.grad is not None for parameter in self.trained])
        totals, users = add_with(totals, used, self.group)
        for parameter, count in zip(self.trained, users.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                self.group.all_reduce(parameter.grad)
        return totals

    def updater(self, updater: Updater) -> Updater:
        return updater

    def norm(self, model: nn.Module) -> Tensor:
        """The length of the whole gradient, which every rank holds: [] float, the same bits on all of them."""
        return model_gradient_norm(self.optimized)

    def cuts(self) -> dict[str, Cut]:
        """None: every rank holds all of each parameter."""
        return {}


class DataParallel(NaiveDataParallel):
    """Data parallelism in buckets, overlapped with the last micro-batch's backward pass.

    Args:
        model: the same weights on every rank. What is not to be trained is frozen already.
        group: the ranks that share out a batch.
        bucket_megabytes: how many gradients travel together. Large ones waste less on each operation, small ones start sooner.

    Attributes:
        buckets: in the order in which they start on every rank: the last layers first, as the backward pass comes by.
    """

    def __init__(self, model: nn.Module, group: Communicator, bucket_megabytes: float = 25.0):
        super().__init__(model, group)
        self.buckets = self.make_buckets(plan_buckets(reversed(self.trained), bucket_megabytes))
        self.under_way: Callable[[], None] | None = None

    def make_buckets(self, plan: Sequence[Sequence[nn.Parameter]]) -> list[Bucket]:
        return [SummedBucket(parameters, self.group) for parameters in plan]

    def runner(self, runner: Runner) -> Runner:
        """Gradients add up here until the last micro-batch, whose backward pass takes them along."""

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            *early, last = microbatches
            parts = [runner(model, early, objective)] if early else []
            self.group.trace.phase = "backward"
            self.under_way = sync_buckets(self.buckets)
            return add_totals([*parts, runner(model, [last], objective)])

        return run

    def finish_exchange(self) -> None:
        """Complete what is under way, if anything is."""
        self.group.trace.phase = "after backward"
        finish, self.under_way = self.under_way, None
        if finish is not None:
            finish()

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        """Complete the exchange; also where gradients came from a runner that began none. Totals are added over the ranks, and with
        them travels how many ranks have used each parameter: one that none has used keeps no gradient."""
        self.under_way = self.under_way or sync_buckets(self.buckets)
        self.finish_exchange()
        used = torch.tensor([flag for bucket in self.buckets for flag in bucket.used])
        totals, users = add_with(totals, used, self.group)
        counts = iter(users.tolist())
        for bucket in self.buckets:
            bucket.used[:] = [False] * len(bucket.used)
            for result in bucket.results:
                if not next(counts):
                    result.grad = None
        return totals
