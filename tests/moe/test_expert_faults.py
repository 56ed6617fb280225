"""A rank that dies around an exchange of rows, is slow, or calls another number of them is named, and the run resumes bit for bit."""

import pytest
from expert_faults import KILLED, LATE, OTHERS, TIMEOUTS, Fault, follow

from shared.parallel.config import parse_layout

FAST = Fault("dp2_ep2", 1, place="backward")


def slow(faults):
    return [pytest.param(each, marks=pytest.mark.slow) for each in faults]


@pytest.mark.parametrize("fault", [FAST, *slow(each for each in KILLED if each != FAST)], ids=str)
def test_a_rank_that_dies_around_an_exchange_is_named_by_all_others(fault, tmp_path):
    found = follow(fault, tmp_path)
    found.require_killed_rank_named(fault.layout, fault.rank)
    found.require_resumed(fault.layout, fault.resumed)


@pytest.mark.parametrize("fault", slow([each for each in OTHERS if each.what == "late"]), ids=str)
def test_a_slow_rank_is_waited_for(fault, tmp_path):
    """Many heartbeats long; nobody is taken for dead, and the weights are those of a run in which all are quick."""
    assert LATE > 10 * TIMEOUTS.heartbeat_interval
    found = follow(fault, tmp_path)
    assert not found.error and not found.told and found.difference == 0


@pytest.mark.slow
def test_a_rank_that_never_joins_an_exchange_is_named_after_the_timeout(tmp_path):
    (fault,) = (each for each in OTHERS if each.what == "asleep")
    found = follow(fault, tmp_path)
    seconds, sentence = found.told[0]
    assert "rank 0 has waited 5 s in all_to_all" in sentence and "of ep: rank 1 is alive and has not joined" in sentence
    assert 4 < seconds < 60
    found.require_resumed(fault.layout, fault.resumed)


@pytest.mark.parametrize("fault", slow(each for each in OTHERS if each.what.startswith("fewer")), ids=str)
def test_ranks_with_another_number_of_batches_are_named_as_a_deadlock(fault, tmp_path):
    """The one with more of them waits in an exchange for rows that nobody sends."""
    found = follow(fault, tmp_path)
    assert "deadlock: " in found.error and "waits in all_to_all" in found.error and f"rank {fault.rank} waits in " in found.error
    assert found.told.keys() == set(range(parse_layout(fault.layout).ranks))
    assert all(found.error in sentence for _, sentence in found.told.values())
    found.require_resumed(fault.layout, fault.resumed)
