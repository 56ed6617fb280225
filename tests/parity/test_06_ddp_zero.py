"""Floor 6: replicas, plain and under ZeRO, do what one process does on the same batch; and bugs that others had do not go unnoticed."""

import sys
import warnings

import cloudpickle
import pytest
import replica_runs
import torch
from replica_runs import (
    EVERYTHING,
    LAYOUTS,
    MEGABYTES,
    OPTIMIZERS,
    SITUATIONS,
    Situation,
    alone,
    close,
    model_of,
    require_same,
    share,
    train_rank,
    train_ranks,
)
from step_records import STEPS
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shared.engine.metrics.gradient_norm import global_gradient_norm
from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.parallel.data.ddp import DataParallel
from shared.parallel.processes.launch import run_processes
from shared.parallel.data.engine import add_over
from shared.parallel.data.zero import Zero
from shared.totals import add_totals


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ddp_and_zero_ranks_equal_one_process(layout, optimizer):
    """With accumulation, uneven counts, a rank without tokens, tied and frozen parameters, and clipping at once."""
    ranks, make = LAYOUTS[layout]
    require_same(train_ranks(optimizer, EVERYTHING, ranks, make), alone(optimizer, EVERYTHING, ranks))


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
@pytest.mark.parametrize("layout", ["dp2", "dp3_zero2"])
def test_ddp_and_zero_equal_one_process_with_each_feature(layout, situation):
    ranks, make = LAYOUTS[layout]
    require_same(train_ranks("adamw", situation, ranks, make), alone("adamw", situation, ranks))


# Bugs that public projects had, planted here. The comparison above must notice each of them.


class EachMicrobatch(DataParallel):
    """Every backward pass exchanges everything that is in `grad`: earlier micro-batches are added up over the ranks again."""

    def runner(self, runner):
        def run(model, microbatches, objective):
            parts = []
            for microbatch in microbatches:
                self.finish_exchange()
                parts.append(DataParallel.runner(self, runner)(model, [microbatch], objective))
            return add_totals(parts)

        return run


class LastMicrobatchOnly(DataParallel):
    def runner(self, runner):
        inner = super().runner(runner)

        def run(model, microbatches, objective):
            totals = runner(model, microbatches[:-1], objective)
            model.zero_grad()
            return add_totals([totals, inner(model, microbatches[-1:], objective)])

        return run


class Disarmed(DataParallel):
    """What happens where the module inside a wrapper is called: only totals are added up."""

    def runner(self, runner):
        return runner

    def reducer(self, model, totals):
        return add_over(totals, self.group)


class Averaged(DataParallel):
    def reducer(self, model, totals):
        totals = super().reducer(model, totals)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.group.size
        return totals


class MeanOfMeans(DataParallel):
    """Each rank divides by its own count, and the mean over ranks is taken."""

    def reducer(self, model, totals):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= totals.token_count.clamp(min=1)
        reduced = super().reducer(model, totals)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= reduced.token_count / self.group.size
        return reduced

    def runner(self, runner):
        return runner


class NeverGathered(Zero):
    def updater(self, updater):
        return lambda model, optimizer, count: updater(self.optim_params, optimizer, count)


class FromTheWrongRank(Zero):
    """The rank before a piece's owner is taken for it, as where a rank of the group is handed over for a global one."""

    def updater(self, updater):
        def update(model, optimizer, count):
            updater(self.optim_params, optimizer, count)
            for parameter in model.parameters():
                self.group.broadcast(parameter.data, root=0)

        return update


class OwnNorm(Zero):
    """Each rank clips by the length of its own pieces."""

    def own_norm(self, model):
        return global_gradient_norm(piece.grad for piece in self.optim_params.parameters())


class LastExchangeOnly(Zero):
    """ZeRO-2 whose pieces keep what the last micro-batch brought."""

    def make_buckets(self, plan):
        buckets = super().make_buckets(plan)
        for bucket in buckets:
            bucket.add_to_shards = lambda total, bucket=bucket: replace_pieces(bucket, total)
        return buckets


def replace_pieces(bucket, total):
    for piece, part in zip(bucket.results, total.split([piece.numel() for piece in bucket.results]), strict=True):
        if piece.numel():
            piece.grad = part.view(piece.shape)


BUGS = {
    "each micro-batch": (EachMicrobatch, {}, Situation(2)),
    "last micro-batch only": (LastMicrobatchOnly, {}, Situation(2)),
    "disarmed": (Disarmed, {}, Situation()),
    "averaged twice": (Averaged, {}, Situation()),
    "mean of means": (MeanOfMeans, {}, Situation(uneven=True)),
    "weights never gathered": (NeverGathered, {"stage": 1}, Situation()),
    "from the wrong rank": (FromTheWrongRank, {"stage": 1}, Situation()),
    "each rank's own norm": (OwnNorm, {"stage": 1}, Situation(max_norm=0.05)),
    "last exchange only": (LastExchangeOnly, {"stage": 2}, Situation(2)),
}


@pytest.mark.parametrize("bug, options, situation", BUGS.values(), ids=BUGS)
def test_known_ddp_bugs_of_other_frameworks_are_noticed(bug, options, situation):
    make = lambda model, world, name: bug(model, world, **options, bucket_megabytes=MEGABYTES)  # noqa: E731
    with pytest.raises(AssertionError):
        require_same(train_ranks("adamw", situation, 2, make), alone("adamw", situation, 2))


def test_means_of_means_agree_where_counts_are_equal_and_so_prove_nothing():
    make = lambda model, world, name: MeanOfMeans(model, world, MEGABYTES)  # noqa: E731
    require_same(train_ranks("adamw", Situation(), 2, make), alone("adamw", Situation(), 2))


# Against PyTorch's own engines, in processes.

PLAIN = Situation(2, uneven=True, tied=True)
OURS = ("dp2", "dp2_zero1", "dp2_zero2")


def torchs_steps(world, sharded: bool) -> dict:
    """The weights after three steps of DistributedDataParallel, which averages, with AdamW or with ZeroRedundancyOptimizer over it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import, and only the ranks want it

    model = model_of(PLAIN)
    wrapped = DistributedDataParallel(model)
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own use of TorchScript
        build = ZeroRedundancyOptimizer(model.parameters(), AdamW, **settings) if sharded else AdamW(model.parameters(), **settings)
    for step in range(STEPS):
        build.zero_grad()
        *early, last = share(PLAIN, world.rank, world.size, step)
        with wrapped.no_sync():
            totals = accumulate_gradients(wrapped, early, next_token_objective)
        totals = add_totals([totals, accumulate_gradients(wrapped, [last], next_token_objective)])
        count = totals.token_count.double()
        world.all_reduce(count)
        for parameter in model.parameters():
            parameter.grad *= world.size / count
        build.step()
    return dict(model.state_dict())


def against_torch(world) -> dict:
    found = {"ddp": torchs_steps(world, sharded=False), "zero": torchs_steps(world, sharded=True)}
    found |= {layout: train_rank(world, "adamw without decay", PLAIN, LAYOUTS[layout][1])[0].weights for layout in OURS}
    return found | {"uneven": train_rank(world, "muon", PLAIN, all_whole)[0].weights}


def all_whole(model, world, name):
    return Zero(model, world, 2, dict(model.named_parameters()), MEGABYTES)


def test_ddp_and_zero_processes_equal_pytorchs_engines():
    cloudpickle.register_pickle_by_value(replica_runs)  # so that ranks need not find the tests' folder
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    first, second = run_processes(against_torch, 2, timeout=300)
    for layout in OURS:
        for name, weight in first[layout].items():
            close(weight, first["ddp"][name], f"{layout}: {name} beside DistributedDataParallel's")
            close(weight, first["zero"][name], f"{layout}: {name} beside ZeroRedundancyOptimizer's")
            close(weight, alone("adamw without decay", PLAIN, 2).weights[name], f"{layout}: {name} beside one process's")
            assert torch.equal(weight, second[layout][name]), f"{layout}: {name} differs between ranks"
    for name, weight in first["uneven"].items():
        close(weight, alone("muon", PLAIN, 2).weights[name], f"{name} under Muon, every parameter whole on one rank")
