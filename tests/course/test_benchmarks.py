"""The ruler of the benchmarks: intervals, pairs in turn, contenders that fail. No test here times anything."""

import pytest
from side_by_side import Comparison, Contender, compare, interval_rank


def test_the_interval_is_the_one_of_order_statistics():
    """Ranks from tables of the sign test: for 15 values the 4th smallest and 4th largest hold the median with 96.5 %."""
    assert [interval_rank(count) for count in (6, 9, 15, 20, 25)] == [1, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="too few"):
        interval_rank(5)


def test_ratios_are_taken_pair_by_pair():
    ours, theirs = [1.0, 2.0, 4.0, 1.0, 1.0, 1.0], [2.0, 4.0, 8.0, 2.0, 3.0, 1.0]
    found = Comparison([{"seconds": s} for s in ours], [{"seconds": s} for s in theirs])
    assert found.ratio == 2.0 and found.interval == (1.0, 3.0) and found.median("theirs") == 2.5


def counting(start: float):
    """A contender whose rounds are numbered."""
    rounds = iter(range(1000))
    return lambda: {"seconds": start + next(rounds)}


def failing():
    raise ValueError("no such model")


def test_contenders_warm_up_and_take_turns():
    ours, theirs = Contender(counting, start=100.0), Contender(counting, start=0.0)
    found = compare(ours, theirs, pairs=6, warmup=2)
    ours.close(), theirs.close()
    assert [entry["seconds"] for entry in found.ours] == [102.0 + i for i in range(6)]
    assert [entry["seconds"] for entry in found.theirs] == [2.0 + i for i in range(6)]


def test_a_contender_that_fails_says_why():
    contender = Contender(failing)
    with pytest.raises(RuntimeError, match="ValueError: no such model"):
        contender.round()
