"""Chapter 06. The mesh: ranks as a grid, whose axes are the ways in which a run is spread.

    rank = ((pp * DP + dp) * FSDP + fsdp) * TP + tp          from outside in: pp, dp, fsdp, tp

Neighbours in rank differ in the innermost axis, which talks most: ranks of one machine stand together. Each rank is in one group along each
axis. The data axis, dp and fsdp taken together, is the one over which a batch is shared out, so losses, token counts and gradients add
over it; expert parallelism (chapter 09) is another cut of the same ranks.
"""

import torch

from shared.parallel.comm.communicator import Communicator
from shared.parallel.config import AXES, ParallelConfig


class Mesh:
    """One rank's place in the grid, and its groups.

    Args:
        config: the degrees.
        world: all ranks. Every rank makes its mesh at the same time.

    Attributes:
        dp, fsdp, tp, pp: this rank's group along each axis, by which `group.rank` is its coordinate.
        data: dp and fsdp together: `data.rank` is this rank's share of a batch, of `data.size`.

    Raises:
        ValueError: the degrees need another number of ranks than there are.
    """

    def __init__(self, config: ParallelConfig, world: Communicator):
        if config.ranks != world.size:
            degrees = " x ".join(f"{name} {getattr(config, name)}" for name in AXES.values() if getattr(config, name) > 1) or "1"
            raise ValueError(
                f"This layout needs {config.ranks} ranks ({degrees}) and there are {world.size}: start as many, or change a degree."
            )
        self.config, self.world = config, world
        grid = torch.arange(world.size).reshape([getattr(config, name) for name in AXES.values()])
        self.pp, self.dp, self.fsdp, self.tp = (
            world.split(axis, grid.movedim(dimension, -1).flatten(0, -2).tolist()) for dimension, axis in enumerate(AXES)
        )
        self.data = world.split("data", grid.movedim(3, 1).flatten(0, 1).flatten(1).tolist())
