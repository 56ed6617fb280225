"""All-reduce from sends and receives, and what operations cost by formula and by the trace."""

from collections import Counter
from functools import partial
from importlib import import_module

import pytest
import torch
from step_exchanges import step_cost, step_exchanges
from torch import Tensor

from shared.loop import accumulate_gradients
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.parallel.comm.collectives import ring_all_reduce
from shared.parallel.comm.communicator import CommunicationError, SingleRankCommunicator
from shared.parallel.config import ParallelConfig
from shared.parallel.planning.costs import Cost, Link, cost, cost_of_entries
from shared.parallel.data.ddp import DataParallel
from shared.parallel.data.fsdp import FullySharded
from shared.parallel.mesh import Mesh
from shared.parallel.comm.threads import run_threads
from shared.parallel.data.zero import Zero

simulation = import_module("chapters.06_data_parallel.simulation")


def random(rank: int, *shape: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11 + rank), dtype=torch.float64).to(dtype)


# Ring all-reduce.


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 4, 7, 30])
def test_every_rank_holds_the_sum(ranks, length):
    def work(world):
        tensor = 10.0**world.rank * torch.arange(1, length + 1, dtype=torch.float64)
        ring_all_reduce(tensor, world)
        return tensor

    expected = sum(10.0**rank for rank in range(ranks)) * torch.arange(1, length + 1, dtype=torch.float64)
    for result in run_threads(work, ranks):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_hold_the_same_bits(dtype):
    def work(world):
        tensor = random(world.rank, 7, 5, dtype=dtype)
        ring_all_reduce(tensor, world)
        return tensor

    results = run_threads(work, 5)
    assert all(torch.equal(result, results[0]) for result in results)
    exact = torch.stack([random(rank, 7, 5, dtype=dtype) for rank in range(5)]).double().sum(0)
    torch.testing.assert_close(results[0].double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


def test_a_group_of_one_rank_copies_whether_the_ranks_are_a_dimension_or_not():
    group, part = SingleRankCommunicator(), random(0, 2, 3)
    for shape in ((2, 3), (1, 2, 3), (6,)):
        whole, back = torch.zeros(shape, dtype=part.dtype), torch.zeros_like(part)
        group.all_gather(whole, part)
        group.reduce_scatter(back, whole)
        assert torch.equal(whole.flatten(), part.flatten()) and torch.equal(back, part)


def test_in_a_group_that_is_not_the_world():
    def work(world):
        tensor = torch.full((4,), 10.0**world.rank)
        ring_all_reduce(tensor, world.split("dp", [[0, 2, 3], [1, 4]]))
        return tensor[0].item()

    assert run_threads(work, 5) == [1101, 10010, 1101, 1101, 10010]


# What they cost: the formulas against the trace.


def measured(function, ranks: int, numbers: int) -> list[Cost]:
    """What each rank has sent, and in how many messages."""

    def work(world):
        function(random(world.rank, numbers), world)
        sent = [entry.bytes for entry in world.trace.entries if entry.operation == "send"]
        return Cost(len(sent), sum(sent))

    return run_threads(work, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_formulas_are_what_the_comm_trace_counts(ranks):
    numbers = 24
    assert measured(ring_all_reduce, ranks, numbers) == [cost("all_reduce", 8 * numbers, ranks)] * ranks


@pytest.mark.parametrize(("ranks", "numbers"), [(3, 23), (5, 2), (7, 100)])
def test_a_ring_of_uneven_chunks_sends_what_the_formula_says_on_average(ranks, numbers):
    sent = measured(ring_all_reduce, ranks, numbers)
    assert sum(each.bytes for each in sent) == pytest.approx(ranks * cost("all_reduce", 8 * numbers, ranks).bytes)
    assert {each.messages for each in sent} == {2 * (ranks - 1)}


def test_the_halves_of_an_all_reduce_cost_what_it_costs():
    halves = cost("reduce_scatter", 1000, 5) + cost("all_gather", 1000, 5)
    assert halves == cost("all_reduce", 1000, 5) == Cost(8, 1600)


def test_seconds_by_hand():
    """A ring of 4 with 8 MB over 1 GB/s and 10 us: 6 messages, 12 MB."""
    link = Link(latency=1e-5, bandwidth=1e9)
    assert cost("all_reduce", 8e6, 4).seconds(link) == pytest.approx(60e-6 + 12e-3)
    assert cost("broadcast", 8e6, 5).seconds(link) == pytest.approx(3 * (1e-5 + 8e-3))
    assert cost("barrier", 0, 4) == cost("all_reduce", 8e6, 1) == cost("receive", 8e6, 4) == Cost(0, 0.0)


def test_an_operation_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="There is no formula for pigeon: known are all_reduce"):
        cost("pigeon", 8, 4)


# What strategies say in a step: the formulas against the ledgers of the real ones.

MODEL = ModelConfig(vocab_size=31, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40)
RANKS = 4


def said(make, microbatches: int) -> tuple[object, Counter, Counter]:
    """The strategy, and what it says in a second step: calls and bytes by operation, without the totals."""
    world = simulation.dry_run(RANKS)
    parallel = make(TransformerModel(MODEL), world)
    ids = torch.randint(31, (microbatches, 2, 9), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": each[:, :-1], "targets": each[:, 1:]} for each in ids]
    for _ in range(2):
        world.trace.clear()
        totals = parallel.runner(accumulate_gradients)(parallel.model, batches, next_token_objective)
        parallel.reducer(parallel.model, totals)
        parallel.updater(lambda model, optimizer, count: None)(parallel.model, None, totals.token_count)
    small = [entry for entry in world.trace.entries if entry.operation == "all_reduce" and entry.bytes <= 8 * 100]
    assert len(small) == 1
    entries = [entry for entry in world.trace.entries if entry is not small[0]]
    return parallel, entries


def sharded(model, world, **changes) -> FullySharded:
    return FullySharded(model, Mesh(ParallelConfig(fully_sharded=RANKS, **changes), world))


STRATEGIES = {
    "ddp": (lambda model, world: DataParallel(model, world, 0.01), {}),
    "zero1": (lambda model, world: Zero(model, world, 1, bucket_megabytes=0.01), {}),
    "zero2": (lambda model, world: Zero(model, world, 2, bucket_megabytes=0.01), {}),
    "fsdp": (sharded, {}),
    "fsdp, kept": (partial(sharded, reshard_after_forward=False), {"reshard": False}),
}


def parts_of(parallel) -> list[int]:
    """Bytes of what travels together, filled up to a multiple of the ranks where it is cut."""
    if isinstance(parallel, FullySharded):
        return [flat.whole.numel() * 4 for unit in parallel.units for flat in unit.flats]
    sizes = [sum(parameter.numel() for parameter in bucket.parameters) for bucket in parallel.buckets]
    return [4 * (size if type(parallel) is DataParallel else -(-size // RANKS) * RANKS) for size in sizes]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_says_what_the_formulas_say(name, microbatches):
    make, options = STRATEGIES[name]
    parallel, entries = said(make, microbatches)
    predicted = step_exchanges(name.split(",")[0], parts_of(parallel), microbatches, **options)
    assert len(predicted) > 3
    assert Counter((entry.operation, entry.bytes) for entry in entries) == Counter((each.operation, each.bytes) for each in predicted)
    assert cost_of_entries(entries).bytes == pytest.approx(step_cost(predicted, RANKS).bytes)


@pytest.mark.parametrize(("strategy", "multiple"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp", 3)])
def test_a_step_moves_the_published_multiple_of_the_parameters(strategy, multiple):
    """Rajbhandari et al. 2020, section 7: 2 P, 2 P and 3 P elements; P as the blocks alone have them, times (n - 1) / n exactly."""
    root = [0] if strategy == "fsdp" else []
    exchanges = step_exchanges(strategy, [*root, 4000, 6000])
    for ranks in (2, 4, 64):
        assert step_cost(exchanges, ranks).bytes == pytest.approx(multiple * 10_000 * (ranks - 1) / ranks)


# Failures in threads are told alike, whichever thread is faster.


def quarrel(world):
    world.barrier()
    if world.rank == 1:
        world.all_gather(torch.zeros(3 * 4), torch.zeros(4))
    world.all_reduce(torch.zeros(4))


def two_fail(world):
    if world.rank:
        raise ArithmeticError(f"of rank {world.rank}")
    world.barrier()


def one_fails_late(world):
    if world.rank == 2:
        torch.randn(200, 200) @ torch.randn(200, 200)
        raise ArithmeticError("of rank 2")
    return sum(world.gather_objects(world.rank))


@pytest.mark.parametrize(
    ("function", "error", "sentence"),
    [
        (quarrel, CommunicationError, r"rank 0 calls all_reduce\(sum\) of float32 \(4,\); rank 1 calls all_gather of float32 \(12,\)"),
        (two_fail, ArithmeticError, "of rank 1"),
        (one_fails_late, ArithmeticError, "of rank 2"),
    ],
)
def test_threads_tell_the_same_failure_every_time(function, error, sentence):
    for _ in range(20):
        with pytest.raises(error, match=sentence):
            run_threads(function, 3)
