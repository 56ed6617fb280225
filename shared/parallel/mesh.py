"""Chapter 06. The device mesh: ranks as a grid, whose axes are the ways in which a run is parallel; and what an axis does to a model.

    rank = (((pp * DP + dp) * FSDP + fsdp) * CP + cp) * TP + tp          from outside in: pp, dp, fsdp, cp, tp

Consecutive ranks differ in the innermost axis, which communicates most, so that its ranks are on one machine. Each rank is in one group
along each axis. A batch is shared over the data axis, dp and fsdp taken together. Losses, token counts and gradients add over the data
axis and over cp, whose ranks see parts of the same rows.

Experts (chapter 09) are spread over the data axis in another way, which their axis decides (`shared.moe.parallel.groups`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import AXES, ParallelConfig
from shared.parallel.data.engine import DataEngine
from shared.parallel.health.agreement import require_agreement


class Mesh:
    """One rank's place in the grid, and its groups.

    Args:
        config: the degrees.
        world: all ranks. Every rank makes its mesh at the same time.

    Attributes:
        pp, dp, fsdp, cp, tp: this rank's group along each axis, by which `group.rank` is its coordinate.
        data: dp and fsdp together: `data.rank` is this rank's share of a batch, of `data.size`.
        loss: data and cp together: over these, losses and gradients add.
        replicas: dp and cp together: over these, gradients of fully sharded parameters add.

    Raises:
        RanksDisagree: the ranks were given different configurations.
        ValueError: the degrees need another number of ranks than there are.
    """

    def __init__(self, config: ParallelConfig, world: Communicator):
        require_agreement(world, "configuration", {"parallel": config})  # before groups are made that would not be the same
        if config.ranks != world.size:
            degrees = " x ".join(f"{name} {getattr(config, name)}" for name in AXES.values() if getattr(config, name) > 1) or "1"
            raise SettingError(
                f"This layout needs {config.ranks} ranks ({degrees}) and there are {world.size}: start as many, or change a degree."
            )
        self.config, self.world = config, world
        grid = torch.arange(world.size).reshape([getattr(config, name) for name in AXES.values()])
        self.pp, self.dp, self.fsdp, self.cp, self.tp = (self.group(axis, grid, [place]) for place, axis in enumerate(AXES))
        self.data = self.group("data", grid, [1, 2])
        self.loss = self.group("loss", grid, [1, 2, 3]) if self.cp.size > 1 else self.data
        self.replicas = self.group("replicas", grid, [1, 3]) if self.cp.size > 1 else self.dp

    def group(self, axis: str, grid: Tensor, dimensions: Sequence[int]) -> Communicator:
        """This rank's group of the ranks that differ in the given dimensions of the grid alone."""
        others = [place for place in range(grid.dim()) if place not in dimensions]
        rows = grid.permute(*others, *dimensions).flatten(len(others)) if others else grid.flatten()[None]
        return self.world.split(axis, rows.flatten(0, -2).tolist())


class Axis:
    """A parallel axis, which shards the computation itself.

    brings: the fields of `ParallelConfig` that it makes take effect.
    """

    brings: tuple[str, ...] = ()

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        """Change a plain model in place, perhaps one on the meta device, and state the facts of its parameters. Does nothing where the mesh
        does not ask for it."""
        raise NotImplementedError

    def engine(self, model: nn.Module, mesh: Mesh) -> DataEngine | None:
        """Its own engine, such as a pipeline's runner, for a model that is shaped and has its memory; None where it has none."""
        return None
