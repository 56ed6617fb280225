"""Chapter 06. The optimizer's state in the CPU's memory, and the step beside it: a GPU then holds weights, gradients and activations.

    gradients and weights down  ->  divide, clip, step on the CPU  ->  weights up          12 bytes for each parameter, in float32

AdamW's state is twice the weights, and is looked at once in a step (Ren et al. 2021, "ZeRO-Offload", section 3). With ZeRO or FSDP each
rank takes down its pieces only, so the CPUs of all ranks share the step.

The weights travel both ways: whoever restores a checkpoint writes the model's, and what is stepped must be those. Left out on purpose: an
overlap of bus and computation, and weights or gradients that live on the CPU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shared.optim.muon import Sharding
from shared.parallel.sharding import Cut, Pieces
from shared.totals import Batch, Objective, Runner, Totals, Updater

if TYPE_CHECKING:
    from shared.parallel.parallelize import Parallel


def offload_optimizer(parallel: "Parallel", home: torch.device | str = "cpu") -> "Parallel":
    """`parallel` with the parameters that its optimizer steps, and so their state, at `home`; itself where they are there already.

    The optimizer is built over `optimized` of what this returns.
    """
    devices = {parameter.device for parameter in parallel.optimized.parameters()}
    return parallel if devices == {torch.device(home)} else Offloaded(parallel, torch.device(home))


class Offloaded:
    """A model that is spread over ranks, or over one, and whose optimizer is elsewhere.

    Attributes:
        model, stored: as before.
        optimized: twins of the trained parameters at `home`, under the same names.
    """

    def __init__(self, parallel: "Parallel", home: torch.device):
        self.inner, self.home, self.model = parallel, home, parallel.model
        self.stored = getattr(parallel, "stored", parallel.model)
        self.away = {name: piece for name, piece in parallel.optimized.named_parameters() if piece.requires_grad}
        cuts = {name: cut for name, cut in parallel.cuts().items() if name in self.away}
        self.optimized = Pieces({name: twin_of(piece, home) for name, piece in self.away.items()}, cuts)

    def runner(self, runner: Runner) -> Runner:
        """The runner, begun without the last step's gradients: the optimizer lets go of its twins' alone."""
        exchanging = self.inner.runner(runner)

        def run(model: nn.Module, microbatches: Sequence[Batch], objective: Objective) -> Totals:
            for piece in self.away.values():
                piece.grad = None
            return exchanging(model, microbatches, objective)

        return run

    def reducer(self, model: nn.Module, totals: Totals) -> Totals:
        return self.inner.reducer(model, totals)

    def updater(self, updater: Updater) -> Updater:
        """Bring gradients and weights down, update there, bring the weights up; then whatever ranks do after an update."""

        def update(pieces: nn.Module, optimizer: Optimizer, token_count: Tensor) -> None:
            self.bring_down()
            updater(self.optimized, optimizer, token_count.to(self.home))
            self.bring_up()

        return self.inner.updater(update)

    def norm(self, model: nn.Module) -> Tensor:
        """Of the gradients where they were computed, since that is where ranks can talk."""
        return self.inner.norm(self.inner.optimized).to(self.home)

    def cuts(self) -> dict[str, Cut]:
        return self.inner.cuts()

    @torch.no_grad()
    def bring_down(self) -> None:
        for twin, piece in zip(self.optimized.parameters(), self.away.values(), strict=True):
            twin.copy_(piece, non_blocking=piece.is_cuda)
            twin.grad = None if piece.grad is None else copy_at(self.home, piece.grad)
        if self.home.type == "cpu" and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from a GPU are still under way, and the CPU reads them now

    @torch.no_grad()
    def bring_up(self) -> None:
        for twin, piece in zip(self.optimized.parameters(), self.away.values(), strict=True):
            piece.copy_(twin, non_blocking=piece.is_cuda)


class FromElsewhere:
    """How a twin is cut: it is gathered where its original is, where ranks can talk, and what is computed with the whole is computed there.

    Args:
        sharding: of the original.
        away: its device.
        home: the twin's.
    """

    def __init__(self, sharding: Sharding, away: torch.device, home: torch.device):
        self.sharding, self.away, self.home, self.shape = sharding, away, home, sharding.shape

    def gather(self, part: Tensor) -> Tensor:
        return self.sharding.gather(part.to(self.away))

    def cut(self, whole: Tensor) -> Tensor:
        return self.sharding.cut(whole).to(self.home)


def twin_of(piece: nn.Parameter, home: torch.device) -> nn.Parameter:
    """A copy of a parameter at `home`, with its role and its cut."""
    twin = nn.Parameter(copy_at(home, piece.detach()))
    if hasattr(piece, "role"):
        twin.role = piece.role
    if hasattr(piece, "sharding"):
        twin.sharding = FromElsewhere(piece.sharding, piece.device, home)
    return twin


def copy_at(home: torch.device, tensor: Tensor) -> Tensor:
    """A GPU's copies lie in pinned memory, which it writes and reads without the CPU; they may still be under way on return."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=home, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=tensor.is_cuda)
