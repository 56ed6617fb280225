"""Floor 6: who holds what under ZeRO, when gradients are let go, and exchanges of uneven parts."""

import pytest
import torch
from replica_runs import LAYOUTS, MEGABYTES, Situation, Weights, digit_objective, exchange, model_of, share, train_rank
from torch import nn

from shared.engine.checkpoint.optimizer_state import name_optimizer_state
from shared.loss import next_token_objective
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.parallelize import routes_of
from shared.parallel.comm.collectives import all_gather_v, reduce_scatter_v
from shared.parallel.data.ddp import MEBIBYTE, plan_buckets
from shared.parallel.data.zero import Zero, bytes_held, muon_matrices
from shared.model.sharding import Box, Sharding


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_pieces_are_balanced_to_the_number(ranks):
    def rank(world):
        parallel = Zero(model_of(Situation()), world, 1, bucket_megabytes=MEGABYTES)
        return sum(piece.numel() for piece in parallel.optim_params.parameters()), parallel.held

    found = run_threads(rank, ranks)
    held = [numbers for numbers, _ in found]
    assert max(held) - min(held) <= 1 and sum(held) == sum(parameter.numel() for parameter in model_of(Situation()).parameters())
    assert all(claimed == held for _, claimed in found)


def test_muons_matrices_are_whole_on_one_rank_of_more_ranks_than_matrices():
    def rank(world):
        model = model_of(Situation())
        matrices = muon_matrices(routes_of(model, OptimizerConfig("muon")))
        parallel = Zero(model, world, 1, matrices, MEGABYTES)
        held = {name: piece.shape for name, piece in parallel.optim_params.named_parameters() if name in matrices and piece.numel()}
        return matrices, held

    found = run_threads(rank, 9)
    assert len(found[0][0]) == 7
    shapes = {name: parameter.shape for name, parameter in model_of(Situation()).named_parameters() if name in found[0][0]}
    assert sorted(name for _, own in found for name in own) == sorted(shapes)
    assert all(shape == shapes[name] for _, own in found for name, shape in own.items())


STATE = {"adamw": 16, "lion": 8, "sgd": 8}  # bytes for each number in float64


@pytest.mark.parametrize(
    "layout, stage, optimizer", [("dp2", 0, "adamw"), ("dp2_zero1", 1, "lion"), ("dp4_zero1", 1, "adamw"), ("dp3_zero2", 2, "sgd")]
)
def test_a_rank_holds_what_the_formula_says(layout, stage, optimizer):
    ranks, make = LAYOUTS[layout]
    numbers = sum(parameter.numel() for parameter in model_of(Situation()).parameters())
    expected = bytes_held(numbers, ranks, stage, weight=8, gradient=8, state=STATE[optimizer])

    def rank(world):
        built = []
        run, parallel = train_rank(world, optimizer, Situation(2), make, lambda optimizer: built.append(optimizer))
        state = name_optimizer_state(parallel.optim_params, built[0])
        held = sum(tensor.nbytes for tensors in state.tensors.values() for tensor in tensors.values() if tensor.dim())
        gradients = [gradient for gradient in run.gradients[-1].values() if gradient is not None]
        return held, sum(each.nbytes for each in gradients), sum(each.nbytes for each in run.weights.values())

    for state, gradients, weights in run_threads(rank, ranks):
        assert abs(state - expected["optimizer state"]) < STATE[optimizer]
        assert weights == expected["weights"]
        if stage != 1:  # its gradients are cut by the end of the step
            assert abs(gradients - expected["gradients"]) < 8


def test_the_formula_agrees_with_the_paper():
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, Adam in mixed precision; gigabytes."""
    held = [sum(bytes_held(7_500_000_000, 64, stage, 2, 2, 12).values()) / 1e9 for stage in range(4)]
    assert held == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_zero_2_lets_gradients_go_while_backward_is_at_work():
    """Whenever an operation begins in the second micro-batch: gradients that are not exchanged yet, pieces, and what is under way."""

    def rank(world, stage):
        situation = Situation(2)
        parallel = Zero(model_of(situation), world, stage, bucket_megabytes=MEGABYTES)
        between, most = [], []

        def objective(model, batch):
            totals = next_token_objective(model, batch)
            between.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
            return totals

        for bucket in parallel.buckets:
            bucket.start = watched(bucket.start, world, most)
        exchange(parallel, share(situation, world.rank, world.size, 0), objective)
        return between, max(most), sum(p.nbytes for p in parallel.model.parameters()), max(bucket.bytes for bucket in parallel.buckets)

    for between, most, all_bytes, largest in run_threads(rank, 2, 2):
        assert between == [0, 0] and most <= 2 * largest < all_bytes
    for between, most, all_bytes, largest in run_threads(rank, 2, 1):
        assert between == [0, all_bytes] and most <= 2 * largest


def watched(start, world, most):
    def starting():
        work = start()
        most.append(sum(entry.bytes for entry in world.trace.entries if entry.end is None and entry.operation == "reduce_scatter"))
        return work

    return starting


def test_a_rank_that_holds_nothing_of_a_parameter_keeps_no_state_for_it():
    def rank(world):
        model = Weights(2)
        parallel = Zero(model, world, 1)
        exchange(parallel, [([0, 1], 1.0)], digit_objective)
        optimizer = build_optimizer(parallel.optim_params, OptimizerConfig("adamw"))
        optimizer.step()
        named = name_optimizer_state(parallel.optim_params, optimizer).tensors
        return {name for name, tensors in named.items() if tensors}, {n for n, p in parallel.optim_params.named_parameters() if p.numel()}

    for with_state, with_numbers in run_threads(rank, 3):
        assert with_state == with_numbers
    assert run_threads(rank, 4)[3][1] == set()


def test_a_parameter_that_is_not_contiguous_is_refused():
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.zeros(3, 5).T)
    with pytest.raises(ValueError, match="not contiguous"):
        Zero(model, SingleRankCommunicator(), 1)


# Uneven parts.


def test_what_is_gathered_is_sent_from_its_own_place():
    """From anywhere else in the whole, it would be received over by another rank's numbers while gloo still sends it."""

    def rank(world):
        places, gather = [], world.all_gather

        def watched(whole, part, **options):
            places.append((part.data_ptr() - whole.data_ptr()) / part.nbytes)
            return gather(whole, part, **options)

        world.all_gather = watched
        all_gather_v(torch.ones(2), (2, 2, 2), world, lambda parts: None).wait()
        return places

    assert run_threads(rank, 3) == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 3, 3), (7, 0, 2), (0, 0, 5)], ids=str)
def test_parts_are_added_up_and_gathered(sizes):
    """Rank i contributes 10^i times the numbers 1, 2, 3, ... of each part."""

    def rank(world):
        parts = [[10.0**world.rank * torch.arange(1.0, size + 1).double()] for size in sizes]
        kept = []
        reduce_scatter_v(parts, world, kept.append).wait()
        all_gather_v(kept[0], sizes, world, kept.append).wait()
        return *kept, world.trace.bytes()

    for place, (own, everything, traffic) in enumerate(run_threads(rank, 3)):
        assert torch.equal(own, 111 * torch.arange(1.0, sizes[place] + 1).double())
        assert [each.tolist() for each in everything] == [(111 * torch.arange(1.0, size + 1)).tolist() for size in sizes]
        if max(sizes) - min(sizes) <= 1:
            assert traffic == {("reduce_scatter", "world"): 24 * max(sizes), ("all_gather", "world"): 24 * max(sizes)}
        else:
            assert traffic == {("all_to_all", "world"): 8 * sum(sizes) + 24 * sizes[place]}


def test_ranks_whose_vocabularies_differ_in_size_plan_the_same_buckets():
    """8 and 7 rows of 8 bytes: the bucket of 72 bytes has room for another row on one of the ranks alone."""

    def plan(world):
        whole = nn.Parameter(torch.zeros(15, 1, dtype=torch.float64))
        rows = Sharding(whole.shape, (Box((0, 0), (8, 1)), Box((8, 0), (7, 1))), world)
        uneven = nn.Parameter(rows.local(whole.detach()).clone())
        uneven.sharding = rows
        others = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
        return [len(bucket) for bucket in plan_buckets([uneven, *others], 72 / MEBIBYTE)]

    assert run_threads(plan, 2) == [[2, 2], [2, 2]]
