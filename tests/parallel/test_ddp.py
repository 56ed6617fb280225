"""Floor 6: how replicas exchange gradients: what travels when, what is held meanwhile, and what happens to parameters in special places."""

from collections import Counter

import pytest
import torch
from replica_runs import LAYOUTS, Situation, Weights, digit_objective, exchange, model_of, share
from step_exchanges import step_exchanges
from torch import nn

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.parallel.data.ddp import DataParallel, NaiveDataParallel, plan_buckets
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.data.zero import Zero

KINDS = {
    "naive": NaiveDataParallel,
    "buckets": lambda model, world: DataParallel(model, world, 1e-9),
    "one bucket": DataParallel,
    "zero 1": lambda model, world: Zero(model, world, 1),
    "zero 2": lambda model, world: Zero(model, world, 2, bucket_megabytes=1e-9),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


# Buckets.


def test_buckets_are_filled_up_to_their_limit_in_order():
    parameters = [nn.Parameter(torch.zeros(size)) for size in (10, 20, 30, 300, 5, 95, 1)]
    plan = plan_buckets(parameters, 400 / 2**20)
    assert [[each.numel() for each in bucket] for bucket in plan] == [[10, 20, 30], [300], [5, 95], [1]]


def test_a_bucket_has_one_dtype():
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.float32 if number % 2 else torch.bfloat16)) for number in range(6)]
    assert [len(bucket) for bucket in plan_buckets(parameters, 25.0)] == [3, 3]
    assert all(len({each.dtype for each in bucket}) == 1 for bucket in plan_buckets(parameters, 25.0))


def test_the_last_layers_come_first_and_frozen_parameters_not_at_all():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    model[1].bias.requires_grad_(False)
    buckets = DataParallel(model, SingleRankCommunicator(), 1e-9).buckets
    assert [bucket.parameters for bucket in buckets] == [(model[1].weight,), (model[0].bias,), (model[0].weight,)]


# Which gradients there are afterwards.


@every_kind
def test_a_gradient_that_some_rank_has_comes_to_all_and_one_that_none_has_to_none(make):
    """Rank 0 uses weight 2 in its first micro-batch and 0 in its last, rank 1 uses 0 and 2 in its last; nobody uses weight 1."""
    batches = [[([2], 1.0), ([0], 10.0)], [([0], 100.0), ([0, 2], 1000.0)]]

    def rank(world):
        parallel = make(Weights(3), world)
        for _ in range(2):
            for parameter in parallel.optim_params.parameters():
                parameter.grad = None
            totals = exchange(parallel, batches[world.rank], digit_objective)
        pieces = dict(parallel.optim_params.named_parameters())
        there = {name: piece.grad for name, piece in pieces.items() if piece.numel()}
        return (
            totals.token_count,
            {name: None if gradient is None else gradient.unique().tolist() for name, gradient in there.items()},
        )

    for count, gradients in run_threads(rank, 2):
        assert count == 4
        expected = {"weights.0": [1110.0], "weights.1": None, "weights.2": [1001.0]}
        assert gradients == {name: expected[name] for name in gradients}
        assert gradients


@every_kind
def test_gradients_that_came_without_the_wrapped_runner_are_exchanged_too(make):
    def rank(world):
        parallel = make(Weights(2), world)
        totals = accumulate_gradients(parallel.model, [([0, 1], 10.0**world.rank)], digit_objective)
        parallel.reducer(parallel.model, totals)
        return [piece.grad.unique().tolist() for piece in parallel.optim_params.parameters() if piece.numel()]

    assert all(value == [11.0] for gradients in run_threads(rank, 2) for value in gradients)


# What travels, and when.


def test_ranks_whose_gradients_are_ready_in_other_orders_exchange_in_one_order():
    """Weights have different lengths, so any two operations that did not belong together would be refused."""
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]

    def rank(world):
        exchange(DataParallel(Weights(4), world, 1e-9), [(orders[world.rank], 1.0)], digit_objective)
        return [(entry.bytes, entry.phase) for entry in world.trace.entries]

    for entries in run_threads(rank, 3):
        assert entries == [(32, "backward"), (24, "backward"), (16, "backward"), (8, "backward"), (8 * (2 + 4), "after backward")]


def counted(world, layout: str, microbatches: int):
    """Operations of one step with their bytes, without the totals' and the norm's."""
    situation = Situation(microbatches=microbatches)
    parallel = LAYOUTS[layout][1](model_of(situation), world, "adamw")
    totals = exchange(parallel, share(situation, world.rank, world.size, 0), next_token_objective)
    parallel.updater(lambda model, optimizer, count: None)(parallel.model, None, totals.token_count)
    return Counter((e.operation, e.bytes) for e in world.trace.entries if e.phase != "after backward"), parallel


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("layout, strategy", [("dp2", "ddp"), ("dp3", "ddp"), ("dp2_zero1", "zero1"), ("dp3_zero2", "zero2")])
def test_what_travels_is_what_the_formula_says(layout, strategy, microbatches):
    for found, parallel in run_threads(counted, LAYOUTS[layout][0], layout, microbatches):
        exchanges = step_exchanges(strategy, [bucket.bytes for bucket in parallel.buckets], microbatches)
        assert found == Counter((each.operation, each.bytes) for each in exchanges)
        numbers = sum(parameter.numel() for parameter in parallel.model.parameters())
        assert 0 <= sum(bucket.bytes for bucket in parallel.buckets) - 8 * numbers < 8 * parallel.group.size * len(parallel.buckets)


def test_without_buckets_each_gradient_is_reduced_separately():
    found, parallel = run_threads(counted_naive, 2)[0]
    assert found == Counter(("all_reduce", parameter.nbytes) for parameter in parallel.model.parameters())


def counted_naive(world):
    parallel = NaiveDataParallel(model_of(Situation()), world)
    exchange(parallel, share(Situation(), world.rank, world.size, 0), next_token_objective)
    return Counter((entry.operation, entry.bytes) for entry in world.trace.entries[:-1]), parallel  # the last one is the totals'


def test_whole_parameters_travel_without_padding():
    """Parts are uneven then: gradients and weights cost their own bytes and no more."""

    def rank(world):
        model = model_of(Situation())
        parallel = Zero(model, world, 1, whole=dict(model.named_parameters()))
        totals = exchange(parallel, share(Situation(), world.rank, world.size, 0), next_token_objective)
        parallel.updater(lambda model, optimizer, count: None)(model, None, totals.token_count)
        own = sum(piece.nbytes for piece in parallel.optim_params.parameters())
        found = [(entry.operation, entry.bytes) for entry in world.trace.entries if entry.phase != "after backward"]
        return found, own, sum(parameter.nbytes for parameter in model.parameters()), parallel.buckets[0].bytes

    ranks = run_threads(rank, 3)
    for found, own, all_bytes, bucket_bytes in ranks:
        assert found == [("all_to_all", all_bytes), ("all_to_all", 3 * own)] and bucket_bytes == all_bytes
    assert sum(own for _, own, _, _ in ranks) == ranks[0][2]
