"""Planted bugs, one for each rule by which layouts are equal to one process: the covering set must catch each, and loss curves do not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import layout_runs
import torch
from products import batch_of, case_of, differences, expected, on_ranks, worst
from pytest import MonkeyPatch
from torch import Tensor

from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.layer import MixtureLayer, mixture_layers
from shared.moe.parallel import all_to_all, axis as expert_axis
from shared.parallel import strategy
from shared.parallel.context import axis as context_axis
from shared.parallel.data.flat import FlatParam
from shared.parallel.held import Holders
from shared.parallel.pipeline import axis as pipeline_axis
from shared.parallel.tensor import axis as tensor_axis


@dataclass(frozen=True)
class Planted:
    """A bug. says: what it does. caught_by: the first case of the covering set that trains otherwise than one process."""

    says: str
    plant: Callable[[MonkeyPatch], None]
    caught_by: str


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
        return inner(engines, totals, group)._replace(token_count=own)

    patch.setattr(strategy, "complete", complete)


def balance_times_ranks(patch: MonkeyPatch) -> None:
    inner = layout_runs.apply_parallel

    def apply_parallel(model, mesh, *given, **options):
        for layer in mixture_layers(model):
            layer.balance_scale *= mesh.data.size
        return inner(model, mesh, *given, **options)

    patch.setattr(layout_runs, "apply_parallel", apply_parallel)


def experts_over_all(patch: MonkeyPatch) -> None:
    inner = expert_axis.expert_groups

    def expert_groups(mesh, count):
        ep, _, ranges = inner(mesh, count)
        return ep, mesh.loss, ranges

    patch.setattr(expert_axis, "expert_groups", expert_groups)


def experts_averaged(patch: MonkeyPatch) -> None:
    right = all_to_all.FinishExchange.backward
    averaged = lambda ctx, upstream: right(ctx, upstream / ctx.exchange.group.size)  # noqa: E731
    patch.setattr(all_to_all.FinishExchange, "backward", staticmethod(averaged))


def router_not_summed(patch: MonkeyPatch) -> None:
    inner = MixtureLayer.over_ranks

    def over_ranks(layer, *given):
        inner(layer, *given)
        del layer.router.weight.partial_over

    patch.setattr(MixtureLayer, "over_ranks", over_ranks)


RULES: dict[str, Planted] = {
    "experts' gradients are added over the ranks that hold the same ones": Planted(
        "over all data ranks", experts_over_all, "dp2_ep2 experts none adamw"
    ),
    "the exchange brings sums, which nobody divides": Planted(
        "gradients are divided by the ranks on their way back", experts_averaged, "dp2_ep2 experts none adamw"
    ),
    "the norm counts each number once": Planted("each rank counts what it holds", norm_counts_copies, "dp2_ep2 experts none adamw"),
    "norms under ZeRO are of all shards": Planted("each rank clips by its own", norm_of_shards, "dp2_ep2 experts none adamw"),
    "a tied embedding's two gradients are added": Planted("each end keeps its own", tied_ends_apart, "pp2 experts full adamw"),
    "positions count from the start of the sequence": Planted("each cp rank counts from 0", positions_from_zero, "cp2 dense full muon"),
    "gradients of norms are summed where they are partial": Planted(
        "each tp rank keeps its own", norms_not_summed, "tp2_sp experts selective muon"
    ),
    "the router's gradient is summed over tp": Planted("each rank keeps its own", router_not_summed, "tp2_sp experts selective muon"),
    "the balance loss knows no ranks": Planted("times the data ranks", balance_times_ranks, "dp2_ep2 experts none adamw"),
    "FSDP adds every micro-batch": Planted(
        "the last replaces the others", last_microbatch_alone, "fsdp2_ep2 experts selective adamw"
    ),
    "one division, by the tokens of all ranks": Planted(
        "by a rank's own tokens, times the ranks", means_of_ranks, "dp2_ep2 experts none adamw"
    ),
}


def caught(bug: Planted, line: str) -> float | None:
    """How far a case is from one process with the bug in it, in its first step; None where the bug cannot be built in."""
    cell, optimizer = case_of(line)
    one = expected(cell, optimizer)
    with MonkeyPatch.context() as patch:
        bug.plant(patch)
        try:
            return worst(on_ranks(partial(differences, one=one, steps=1), cell, optimizer))
        except ValueError:
            return None


def curve(run, steps: int = 20) -> list[float]:
    """The loss of each step."""
    return [float((run.train(1).totals.loss_sum / run.totals.token_count)) for _ in range(steps)]


def again(step: int, microbatch: int, config) -> dict[str, Tensor]:
    """Two batches over and over, so that the loss falls."""
    return batch_of(step % 2, microbatch, config)


def last_losses(bug: Planted) -> tuple[float, float, float]:
    """After 20 steps: of one process, of the case with the bug, and of one process with other initial weights."""
    cell, optimizer = case_of(bug.caught_by)
    single = replace(cell, layout="one")
    other = lambda model: TransformerModel(model.config, MIXTURE, seed=1).double()  # noqa: E731
    one, seed = (on_ranks(curve, single, optimizer, batches=again, config=cell.config, **more)[0][-1] for more in ({}, {"prepare": other}))
    with MonkeyPatch.context() as patch:
        bug.plant(patch)
        return one, on_ranks(curve, cell, optimizer, batches=again)[0][-1], seed
