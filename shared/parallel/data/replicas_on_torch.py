"""Chapter 06. DDP on PyTorch's own engine: `DistributedDataParallel`, configured to sum gradients instead of averaging them.

By default DDP divides gradients by the number of ranks, and a mean over ranks is not the mean over tokens, of which ranks hold unequally
many. Here the gradients of the loss sum are added, as everywhere in this course, and the updater divides once.

ZeRO-1 is DDP with this course's partition: `ZeroRedundancyOptimizer` sends whole parameters only, and gives its state to one rank alone.

Left out on purpose: CUDA graphs, and compiled autograd.
"""

import inspect
import warnings
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.parallel.comm.communicator import Communicator
from shared.parallel.data.engine import DataEngine
from shared.parallel.data.zero import Zero
from shared.parallel.mesh import Mesh
from shared.totals import Batch, Objective, Runner, Totals, Updater, add_totals

# Buffers stay each rank's own. The option was renamed in torch 2.13.
NAMES_OF_IT = ("forward_sync_buffers", "broadcast_buffers")
LEAVE_BUFFERS = {next(name for name in NAMES_OF_IT if name in inspect.signature(DistributedDataParallel).parameters): False}


class TorchReplicas(DataEngine):
    """A replica of the model on each rank of `mesh.data`: `DistributedDataParallel`.

    Args:
        model: on its device, the same on every rank. Parameters that are not to be trained are frozen already.
        mesh: `bucket_megabytes` of its configuration is read.
        part: the parameters that it serves; the model for all of them.

    Attributes:
        model: the wrapper. Objectives must call it: a call of the module inside exchanges nothing, without a word.
        optim_params: the part, whose names are the plain ones.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, part: nn.Module):
        super().__init__(model, mesh.data)
        self.optim_params = part
        served = {name for name, _ in part.named_parameters()}
        others = [name for name, _ in model.named_parameters() if name not in served]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, others)
        # Looked for at each step: which parameters a step uses may depend on the data, and a rank that waits for a gradient
        # that never comes hangs. The warning says that a walk over the graph could be saved in a model that uses all of them.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        self.model = DistributedDataParallel(
            model,
            process_group=mesh.data.torch_group,
            bucket_cap_mb=mesh.config.bucket_megabytes,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            **LEAVE_BUFFERS,
        )
        self.model.register_comm_hook(mesh.data, summed)

    def runner(self, runner: Runner) -> Runner:
        """Exchange gradients in the last micro-batch only (`no_sync` in the others)."""

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            *early, last = microbatches
            parts = []
            if early:
                with self.model.no_sync():
                    parts.append(runner(model, early, objective))
            return add_totals([*parts, runner(model, [last], objective)])

        return run


def summed(group: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook: all-reduces a bucket as a sum, where DDP's default divides it by the number of ranks."""
    buffer, started = bucket.buffer(), []
    start = lambda: started.append(dist.all_reduce(buffer, group=group.torch_group, async_op=True))  # noqa: E731
    group.dispatch("all_reduce", buffer, start, asynchronous=True)
    entry = group.trace.last

    def arrived(future: torch.futures.Future) -> Tensor:
        group.trace.note_end(entry)
        return future.value()[0]

    return started[0].get_future().then(arrived)


class TorchZero(TorchReplicas):
    """ZeRO-1 on DDP's gradients: each rank steps its shards of the optimizer state.

    Args:
        whole: names of parameters that must not be cut (`shared.parallel.data.zero.muon_matrices`).
    """

    def __init__(self, model: nn.Module, mesh: Mesh, part: nn.Module, whole: Collection[str]):
        super().__init__(model, mesh, part)
        self.zero = Zero(part, mesh.data, 1, whole, mesh.config.bucket_megabytes, alone=part is model)
        self.optim_params = self.zero.optim_params

    def finish(self) -> None:
        """Move each shard's part of DDP's gradient from the parameter to the shard."""
        for bucket in self.zero.buckets:
            for parameter, shard in zip(bucket.parameters, bucket.results, strict=True):
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None and shard.numel():
                    shard.grad = shard.sharding.here.of(gradient).view(shard.shape)

    def updater(self, updater: Updater) -> Updater:
        return self.zero.updater(updater)
