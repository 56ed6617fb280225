"""Chapter 09. Expert parallelism as an axis of the mesh: each rank holds some of a layer's experts, and rows travel to them and back.

    route, sort by expert  ->  exchange numbers, exchange rows  ->  sort by own expert, compute  ->  sort back, exchange back  ->  combine

The data ranks hold the experts between them: ep needs no ranks of its own. Router, shared experts and all other layers stay as they are.
A layer's names stay too; its expert matrices [E, out, in] become boxes [E / ep, out, in], whose gradients are added over the ranks that
hold the same experts (`shared.moe.parallel.groups`). Data engines, clipping and checkpoints read this off the parameters.

The layer computes its shared experts while the rows are on their way back, and in the backward pass while their gradients are on their
way to the experts: one of the two exchanges of each pass is hidden behind them.

Left out on purpose: experts that move between ranks as their load changes; and rows kept from the first exchange where a block is computed
again, which exchanges them again: the operations that selective recomputation keeps are PyTorch's own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shared.course.errors import SettingError
from shared.model.config import ModelConfig
from shared.model.context import to_compute_dtype
from shared.model.sharding import Range, cut_parameter
from shared.moe.layer import MixtureLayer, mixture_layers
from shared.moe.parallel.all_to_all import begin_exchange, exchange_counts, exchange_rows
from shared.moe.parallel.groups import expert_groups
from shared.parallel.comm.communicator import Communicator
from shared.parallel.mesh import Axis, Mesh

ExchangeRows = Callable[[Tensor, Sequence[int], Sequence[int], Communicator], Tensor]


class ExpertParallel(Axis):
    """Expert parallelism."""

    brings = ("expert_parallel",)

    def shape(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.config.expert_parallel == 1:
            return
        require_experts(model.config, mesh.config.expert_parallel)
        ep, edp, ranges = expert_groups(mesh, model.config.experts.num_experts)
        by_torch = None
        if mesh.config.backend == "torch":  # which takes seconds to import
            from shared.moe.parallel.all_to_all import exchange_rows_by_torch as by_torch
        for layer in mixture_layers(model):
            spread(layer, ep, edp, ranges, by_torch)


def require_experts(config: ModelConfig, degree: int) -> None:
    """Reject a model whose experts cannot be spread over `degree` ranks."""
    if degree > 1 and config.experts is None:
        raise SettingError(
            f"parallel.expert_parallel is {degree}, and the model has no experts: leave it out, or give it some (model.experts)."
        )
    if degree > 1 and config.experts.num_experts % degree:
        raise SettingError(
            f"parallel.expert_parallel {degree} does not divide model.experts.num_experts {config.experts.num_experts}, and every rank "
            "holds equally many: change one of them."
        )


def spread(layer: MixtureLayer, ep: Communicator, edp: Communicator, ranges: Sequence[Range], by_torch: ExchangeRows | None = None) -> None:
    """Keep this rank's experts of a layer, and let it compute with those of all ranks of `ep`. by_torch: see `SpreadExperts`."""
    for linear in layer.experts.children():
        cut_parameter(linear, "weight", 0, ranges, ep).shared_over = edp
    spread_out = SpreadExperts(layer.experts.forward, ep, by_torch)
    layer.experts.forward, layer.experts.arrived = spread_out.forward, spread_out.arrived


class SpreadExperts:
    """The experts of all ranks of a group, in place of a layer's.

    Args:
        compute: what this rank's experts make of rows that are sorted by expert, given how many each of them has.
        by_torch: PyTorch's exchange, whose result blocks where it is first used; None for this course's own.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], group: Communicator, by_torch: ExchangeRows | None = None):
        self.compute, self.group, self.by_torch = compute, group, by_torch

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of this rank's rows [n, D], sorted by expert, of which counts [E] each has: [n, D] on its way back."""
        sent, received, own = exchange_counts(counts, self.group)
        arriving = [sum(row) for row in received]
        arrived = (self.by_torch or exchange_rows)(to_compute_dtype(rows), sent, arriving, self.group)
        made = self.compute(transpose_parts(arrived, received), own)
        made = transpose_parts(made, list(zip(*received, strict=True)))
        if self.by_torch is not None:
            return self.by_torch(made, arriving, sent, self.group)
        rows, self.way_back = begin_exchange(made, arriving, sent, self.group)
        return rows

    def arrived(self, rows: Tensor) -> Tensor:
        return self.way_back.finish(rows) if self.by_torch is None else rows


def transpose_parts(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows in parts of sizes[0][0], sizes[0][1], ..., sizes[1][0], ... -> the same parts in the order [0][0], [1][0], ..., [0][1], ...

    Rows that arrive from rank after rank, each rank's by expert, are then sorted by expert. One copy, and one in the backward pass.
    """
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return rows
    width = len(sizes[0])
    parts = rows.split([size for row in sizes for size in row])
    return torch.cat([part for column in range(width) for part in parts[column::width]])
