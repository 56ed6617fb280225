"""Chapter 06. The engine's world with many ranks: what all of them must decide alike, and what held-out data says on all of them.

Totals are sums, so those of ranks add; they travel together, as one small vector of float64, in which counts are exact.
"""

import torch
from torch import Tensor

from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Mesh
from shared.totals import Totals


class ManyRanks:
    """A run over the ranks of a mesh: a `shared.engine.world.World`. device: where small tensors travel from; the model's."""

    def __init__(self, mesh: Mesh, device: torch.device):
        self.mesh, self.device = mesh, device

    def agree(self, reason: str | None) -> str | None:
        """The first reason that any rank has. Eight bytes travel where none has one, and the words only where one has."""
        if self.mesh.world.size == 1:
            return reason
        somebody = torch.tensor([float(reason is not None)], dtype=torch.float64, device=self.device)
        self.mesh.world.all_reduce(somebody, op="max")
        if not somebody:
            return None
        return next(each for each in self.mesh.world.gather_objects(reason) if each is not None)

    def add(self, totals: Totals) -> Totals:
        return add_over(totals, self.mesh.data)


def add_over(totals: Totals, group: Communicator) -> Totals:
    """The totals over the ranks of a group, on each of them. One all-reduce."""
    return add_with(totals, torch.empty(0), group)[0]


def add_with(totals: Totals, counts: Tensor, group: Communicator) -> tuple[Totals, Tensor]:
    """Totals and other counts [n] over the ranks of a group, in one all-reduce. The counts come back as float64 on the CPU."""
    if group.size == 1:  # perhaps on a device that knows no float64
        return totals, counts.double().cpu()
    values = [totals.loss_sum, totals.token_count, *totals.metrics.values()]
    device = totals.loss_sum.device
    packed = torch.cat([torch.stack([value.detach().to(device, torch.float64) for value in values]), counts.to(device, torch.float64)])
    group.all_reduce(packed)
    loss_sum, token_count, *metrics = (total.to(value.dtype) for total, value in zip(packed[: len(values)], values, strict=True))
    return Totals(loss_sum, token_count, dict(zip(totals.metrics, metrics, strict=True))), packed[len(values) :].cpu()
