"""Planted bugs, one for each rule by which layouts are equal to one process: the covering set must catch each, and loss curves do not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import layout_runs
import torch
from products import Cell
from pytest import MonkeyPatch
from torch import Tensor

from shared.moe.layer import MixtureLayer, mixture_layers
from shared.parallel import strategy
from shared.parallel.context import axis as context_axis
from shared.parallel.data.flat import FlatParam
from shared.parallel.holders import Holders
from shared.parallel.pipeline import axis as pipeline_axis
from shared.parallel.tensor import axis as tensor_axis


@dataclass(frozen=True)
class Planted:
    """A bug. says: what it does. caught_by: the first cell of the covering set, and its optimizer, that is not equal to one process."""

    says: str
    plant: Callable[[MonkeyPatch], None]
    caught_by: tuple[Cell, str] | None = None


def norm_counts_copies(patch: MonkeyPatch) -> None:
    patch.setattr(Holders, "copies", lambda self, name: 1)


def norm_of_shards(patch: MonkeyPatch) -> None:
    patch.setattr(Holders, "everywhere", True)


def tied_ends_apart(patch: MonkeyPatch) -> None:
    alone = lambda mesh: mesh.world.split("pp_ends", [[rank] for rank in range(mesh.world.size)])  # noqa: E731
    patch.setattr(pipeline_axis, "group_of_ends", alone)


def positions_from_zero(patch: MonkeyPatch) -> None:
    def with_positions(share):
        def hook(model, inputs, options):
            return inputs, options | ({} if share.length is None else {"positions": torch.arange(inputs[0].shape[1])})

        return hook

    patch.setattr(context_axis, "with_positions", with_positions)


def norms_not_summed(patch: MonkeyPatch) -> None:
    table = tensor_axis.gradient_sums
    patch.setattr(tensor_axis, "gradient_sums", lambda *given: {n: over for n, over in table(*given).items() if "norm" not in n})


def last_microbatch_alone(patch: MonkeyPatch) -> None:
    add = FlatParam.add

    def replacing(flat: FlatParam, gradient: Tensor) -> None:
        flat.gradient = None
        add(flat, gradient)

    patch.setattr(FlatParam, "add", replacing)


def means_of_ranks(patch: MonkeyPatch) -> None:
    inner = strategy.complete

    def complete(engines, totals, group):
        own = totals.token_count * group.size
        return replace(inner(engines, totals, group), token_count=own)

    patch.setattr(strategy, "complete", complete)


def balance_times_ranks(patch: MonkeyPatch) -> None:
    inner = layout_runs.apply_parallel

    def apply_parallel(model, mesh, *given, **options):
        for layer in mixture_layers(model):
            layer.balance_scale *= mesh.data.size
        return inner(model, mesh, *given, **options)

    patch.setattr(layout_runs, "apply_parallel", apply_parallel)
