"""What ranks say to each other, in threads and in processes: the same results, the same ledgers, the same bits."""

import sys

import cloudpickle
import pytest
import torch
from rank_cases import CASES, EXPECTED, digits, reduced, run_cases

from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.processes.launch import run_processes

RANKS = 3
WORLDS = {"threads": run_threads, "processes": run_processes}
in_both = pytest.mark.parametrize("run", WORLDS.values(), ids=WORLDS)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that ranks need not import pytest


@pytest.fixture(scope="module")
def found():
    return {name: run(run_cases, RANKS) for name, run in WORLDS.items()}


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_collectives_give_every_rank_the_expected_result(found, kind, case):
    for rank, (results, _) in enumerate(found[kind]):
        assert results[case][0] == EXPECTED[case](rank)


@pytest.mark.parametrize("case", CASES)
def test_both_worlds_write_the_same_ledger(found, case):
    for (threads, _), (processes, _) in zip(found["threads"], found["processes"], strict=True):
        assert threads[case][1:] == processes[case][1:]


def test_the_ledger_counts_whole_tensors(found):
    results, _ = found["processes"][0]
    assert results["all_reduce"][2] == ({("all_reduce", "world"): 3}, {("all_reduce", "world"): 3 * 10 * 8})
    assert results["reduce_scatter"][2][1] == {("reduce_scatter", "world"): 6 * 8}
    assert results["ring"][2][0] == {("send", "world"): 2, ("receive", "world"): 2}
    assert results["groups"][2][0] == {("all_reduce", "pair"): 1, ("broadcast", "pair"): 1, ("all_gather", "trio"): 1}
    assert found["processes"][1][0]["groups"][2][0] == {("all_gather", "trio"): 1}, "a group of one sends nothing and counts nothing"


def test_processes_talk_through_the_loopback_device_only(found):
    assert all(addresses == {"127.0.0.1"} for _, addresses in found["processes"])


def test_threads_meet_on_any_number_of_ranks():
    for ranks in (1, 2, 4, 7):
        assert run_threads(lambda world: reduced(world, digits(world, 1), "sum").item(), ranks) == [int("1" * ranks)] * ranks


def noise(world):
    generator = torch.Generator().manual_seed(world.rank)
    tensor = torch.randn(10007, generator=generator)
    world.all_reduce(tensor)
    part = torch.randn(world.size * 11, generator=generator)
    share = torch.zeros(11)
    world.reduce_scatter(share, part)
    return tensor, share


@in_both
def test_a_sum_is_the_same_bits_on_every_rank(run):
    sums, shares = zip(*run(noise, RANKS), strict=True)
    assert all(torch.equal(sums[0], each) for each in sums)
    alone, _ = zip(*run_threads(noise, RANKS), strict=True)
    torch.testing.assert_close(sums[0], alone[0])
    assert len(shares) == RANKS


def test_one_rank_alone_answers_every_operation():
    world = SingleRankCommunicator()
    tensor, part = torch.arange(3.0), torch.zeros(3)
    world.all_reduce(tensor)
    world.all_gather(part, tensor)
    world.reduce_scatter(tensor, part)
    world.broadcast(tensor, 0)
    world.all_to_all([part], [tensor])
    world.barrier()
    assert part.tolist() == tensor.tolist() == [0, 1, 2] and world.gather_objects((1,)) == [[1]]
    assert world.split("dp", [(0,)]).axis == "dp" and not world.trace.entries
    with pytest.raises(ValueError, match="is this rank itself"):
        world.send(tensor, 0)
