"""Chapter 06. A rank's state, and the placement table: which ranks hold which part of which parameter, exchanged at the start.

Gradient norm, checkpoint and replica check ask the same question of any layout: how many ranks hold this part?

    norm^2 of the whole = sum over ranks and parts of |part|^2 / (ranks that hold the part)

Left out on purpose: what changes during a run. Parts are where they were when the model was sharded.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shared.model.sharding import Region
from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Mesh

Table = tuple[Mapping[str, Region], Mapping[str, torch.dtype]]  # this rank's regions of the whole; dtypes, where they are needed


def placement(world: Communicator, *tables: Table) -> list["Holders"]:
    """The placement of each of this rank's tables, by one exchange over all ranks. Every rank calls it."""
    mine = [
        ([[name, *region] for name, region in regions.items()], {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()})
        for regions, dtypes in tables
    ]
    everyone = world.gather_objects(mine)
    return [Holders([of_rank[number] for of_rank in everyone], world.rank) for number in range(len(tables))]


class Holders:
    """A placement table. `placement` makes it, on all ranks together.

    Attributes:
        by_rank: for each rank its regions by name, without empty ones.
        ranks: (name, region) -> the ranks that hold exactly that, ascending.
        shapes: name -> shape of the whole, of every name that any rank has.
        dtypes: name -> dtype, of those whose dtype was given.
    """

    def __init__(self, everyone: Sequence[tuple[list[list[Any]], dict[str, str]]], rank: int):
        self.dtypes: dict[str, torch.dtype] = {name: getattr(torch, dtype) for _, dtypes in everyone for name, dtype in dtypes.items()}
        self.rank, self.size = rank, len(everyone)
        self.by_rank: list[dict[str, Region]] = []
        self.ranks: dict[tuple[str, Region], list[int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for number, (rows, _) in enumerate(everyone):
            told = {row[0]: Region(tuple(row[1]), tuple(row[2]), tuple(row[3]), row[4], row[5]) for row in rows}
            self.by_rank.append({name: region for name, region in told.items() if region.numel})
            for name, region in told.items():
                self.shapes.setdefault(name, region.shape)
                if region.numel:
                    self.ranks.setdefault((name, region), []).append(number)

    @cached_property
    def everywhere(self) -> bool:
        """Whether every rank holds all of every tensor."""
        return all(len(ranks) == self.size for ranks in self.ranks.values())

    def copies(self, name: str) -> int:
        """How many ranks hold the same part of a tensor as this one; 1 where it holds nothing."""
        region = self.by_rank[self.rank].get(name)
        return len(self.ranks[name, region]) if region else 1

    def writers(self, among: Collection[int]) -> dict[tuple[str, Region], int]:
        """Which of the ranks `among` writes which part into a checkpoint: of several that hold the same, the one that has least to write so
        far."""
        load = dict.fromkeys(among, 0)
        chosen = {}
        for part in sorted(self.ranks, key=lambda part: (len(self.ranks[part]) > 1, -part[1].numel, part)):
            if holding := [rank for rank in self.ranks[part] if rank in load]:
                rank = min(holding, key=lambda rank: load[rank])
                chosen[part] = rank
                load[rank] += part[1].numel
        return chosen

    def complete_among(self, ranks: Collection[int]) -> bool:
        """Whether these ranks together hold the whole of every tensor."""
        return all(not set(ranks).isdisjoint(holding) for holding in self.ranks.values())

    def require_complete(self) -> None:
        """Require that the distinct parts of each tensor add up to the whole: without gaps, and without overlaps."""
        held: dict[str, int] = dict.fromkeys(self.shapes, 0)
        for name, region in self.ranks:
            held[name] += region.numel
        for name, shape in self.shapes.items():
            if held[name] != math.prod(shape):
                raise ValueError(
                    f"The ranks hold {held[name]} of the {math.prod(shape)} numbers of {name} {list(shape)} in parts that are to make up "
                    "the whole: its sharding is wrong on some rank, and nothing that is saved of it could be trusted."
                )


class Held:
    """A rank's state and its placement: the part of a distributed strategy that checkpoints and the replica check read.

    Attributes:
        module: the plain model, or this rank's part of it.
        state: a module whose `state_dict` has this rank's weights and whose `named_parameters` are the optimizer's, by logical name.
        mesh: this rank's.
        weight_regions, optim_regions: logical name -> the region of the whole that this rank has of a weight, or of an optimizer's
            parameter.
        holders: which ranks hold which weights.
        optim_holders: the same for the optimizer's parameters, and so for gradients and optimizer state.
        measured: the gradient norm of the last step; None before the first one.
    """

    module: nn.Module
    state: nn.Module
    mesh: Mesh
    weight_regions: dict[str, Region]
    optim_regions: dict[str, Region]
    holders: Holders
    optim_holders: Holders
    measured: Tensor | None
