"""Chapter 06. Optimizer offload (ZeRO-Offload): the optimizer's state is in the CPU's memory, and its step runs on the CPU.

    gradients and weights down  ->  divide, clip, step on the CPU  ->  weights up          12 bytes for each parameter, in float32

AdamW's state is twice the weights, and is used once in a step (Ren et al. 2021, "ZeRO-Offload", section 3). With ZeRO or FSDP each
rank copies its shards only, so the CPUs of all ranks share the step.

Weights are copied both ways, because restoring a checkpoint writes to the model's weights, from which a step must start.

Left out on purpose: overlapping copies with computation, and keeping weights or gradients on the CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.model.sharding import copy_facts, sharding_of
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.data.engine import DataEngine, Parameters
from shared.totals import Batch, Objective, Runner, Totals, Updater


class OffloadedOptimizer(DataEngine):
    """An engine around the optimizer's step: it steps copies of the shards at `home`.

    Attributes:
        optim_params: copies of the trained parameters at `home`, under the same names.
    """

    def __init__(self, model: nn.Module, optim_params: nn.Module, home: torch.device | str = "cpu"):
        super().__init__(model, SingleRankCommunicator())
        self.home = torch.device(home)
        self.away = {name: shard for name, shard in optim_params.named_parameters() if shard.requires_grad}
        self.optim_params = Parameters({name: copy_of(shard, self.home) for name, shard in self.away.items()})

    def runner(self, runner: Runner) -> Runner:
        """Clear the shards' gradients before the step: the optimizer clears those of its copies only."""

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            for shard in self.away.values():
                shard.grad = None
            return runner(model, microbatches, objective)

        return run

    def updater(self, updater: Updater) -> Updater:
        """Copy gradients and weights to `home`, update there, and copy the weights back."""

        def update(model: nn.Module, optimizer: Optimizer, token_count: Tensor) -> None:
            self.bring_down()
            updater(self.optim_params, optimizer, token_count.to(self.home))
            self.bring_up()

        return update

    @torch.no_grad()
    def bring_down(self) -> None:
        for copy, shard in zip(self.optim_params.parameters(), self.away.values(), strict=True):
            copy.copy_(shard, non_blocking=shard.is_cuda)
            copy.grad = None if shard.grad is None else copy_at(self.home, shard.grad)
        if self.home.type == "cpu" and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from a GPU are still under way, and the CPU reads them now

    @torch.no_grad()
    def bring_up(self) -> None:
        for copy, shard in zip(self.optim_params.parameters(), self.away.values(), strict=True):
            shard.copy_(copy, non_blocking=shard.is_cuda)


def copy_of(shard: nn.Parameter, home: torch.device) -> nn.Parameter:
    """A copy of a parameter at `home` with its attributes; it is gathered on the device of the original, where the group communicates."""
    copy = copy_facts(shard, nn.Parameter(copy_at(home, shard.detach())))
    if sharding := sharding_of(shard):
        copy.sharding = sharding.on(shard.device)
    return copy


def copy_at(home: torch.device, tensor: Tensor) -> Tensor:
    """A copy at `home`; of a GPU's tensor in pinned memory, asynchronously."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=home, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=tensor.is_cuda)
