"""Plans of rows: every token once, rows as full as they can be, and a million documents in seconds."""

import time
from itertools import product

import numpy as np
import pytest
import torch

from shared.data.packing import best_fit, pack_documents, plan_rows

STRATEGIES = ("best_fit", "sequential")


def covered(plan, lengths) -> np.ndarray:
    """How often each prediction of each document is in the plan, all documents one after the other."""
    predictions = np.maximum(lengths - 1, 0)
    times = np.zeros(predictions.sum(), dtype=np.int64)
    first = np.cumsum(predictions) - predictions
    for row in range(plan.rows):
        for document, start, stop in plan.segments(row):
            times[first[document] + start : first[document] + stop - 1] += 1
    return times


def random_lengths(seed: int, documents: int, longest: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, longest, documents)


@pytest.mark.parametrize(("strategy", "seed"), list(product(STRATEGIES, range(20))))
def test_every_token_is_an_input_exactly_once(strategy, seed):
    lengths, seq = random_lengths(seed, 3 * seed, 40), 1 + seed
    plan = plan_rows(lengths, seq, strategy)
    assert (covered(plan, lengths) == 1).all()
    assert plan.predictions == np.maximum(lengths - 1, 0).sum()
    for row in range(plan.rows):
        segments = plan.segments(row)
        assert segments and sum(stop - start - 1 for _, start, stop in segments) <= seq
        assert all(0 <= start < stop - 1 < stop <= lengths[document] for document, start, stop in segments)


def test_a_plan_that_loses_a_token_is_noticed():
    """The negative control of the test above."""
    lengths = np.array([5, 9, 3])
    plan = plan_rows(lengths, 8)
    plan.stop[0] -= 1
    assert not (covered(plan, lengths) == 1).all()


@pytest.mark.parametrize("seed", range(30))
def test_best_fit_is_what_the_slow_one_finds(seed):
    """One piece after the other, longest first, into the fullest row that has room: the rows are as full."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40))
    sizes = rng.integers(1, capacity + 1, int(rng.integers(0, 90)))
    rooms: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [place for place, room in enumerate(rooms) if room >= size]
        place = min(fitting, key=rooms.__getitem__) if fitting else len(rooms)
        rooms += [capacity] if place == len(rooms) else []
        rooms[place] -= size
    filled = np.bincount(best_fit(sizes, capacity), weights=sizes)
    assert sorted(capacity - filled.astype(int)) == sorted(rooms)


@pytest.mark.parametrize("seed", range(15))
def test_best_fit_is_near_the_optimum(seed):
    """At most 11/9 of the fewest rows that are possible and one more (Johnson 1973), the optimum by trying everything."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, 7)  # two of any fit into a row, so four rows hold all
    rows = plan_rows(sizes + 1, 10).rows
    fewest = min(len(set(places)) for places in product(range(4), repeat=7) if max(np.bincount(places, weights=sizes)) <= 10)
    assert fewest <= rows <= 11 / 9 * fewest + 1


def test_sequential_rows_are_full_and_best_fit_cuts_less():
    lengths = random_lengths(3, 500, 90)
    sequential, fitted = plan_rows(lengths, 64, "sequential"), plan_rows(lengths, 64)
    assert sequential.rows == -(-sequential.predictions // 64)
    whole = np.sum(lengths >= 2)
    assert fitted.pieces - whole < (sequential.pieces - whole) / 2
    assert fitted.filled > 0.97


def test_a_document_longer_than_a_row_is_cut_into_pieces_that_share_a_token():
    plan = plan_rows(np.array([8]), 3)
    pieces = sorted(segment for row in range(plan.rows) for segment in plan.segments(row))
    assert pieces == [(0, 0, 4), (0, 3, 7), (0, 6, 8)]


def test_spare_positions_stay_free_for_each_piece():
    lengths, seq, slack = random_lengths(5, 200, 60), 40, 4
    plan = plan_rows(lengths, seq, slack=slack)
    assert (covered(plan, lengths) == 1).all()
    assert all(sum(stop - start - 1 + slack for _, start, stop in plan.segments(row)) <= seq for row in range(plan.rows))


def test_rows_of_a_plan_can_be_packed():
    lengths = random_lengths(7, 60, 50)
    plan = plan_rows(lengths, 32)
    texts = [torch.arange(length) + 1000 * number for number, length in enumerate(lengths)]
    seen = []
    for row in range(plan.rows):
        packed = pack_documents([texts[document][start:stop] for document, start, stop in plan.segments(row)], 32)
        counted = packed["targets"] != -100
        assert torch.equal(packed["targets"][counted], packed["input_ids"][counted] + 1)
        seen += packed["input_ids"][counted].tolist()
    assert sorted(seen) == [int(token) for text in texts for token in text[:-1]]


def test_nothing_to_plan_and_nothing_to_predict():
    for lengths in ([], [0], [1, 1]):
        for strategy in STRATEGIES:
            plan = plan_rows(np.array(lengths, dtype=np.int64), 8, strategy)
            assert plan.rows == plan.pieces == plan.predictions == 0 and plan.filled == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seq": 0}, "holds no prediction"),
        ({"seq": 8, "slack": 8}, "holds no prediction"),
        ({"seq": 8, "slack": -1}, "holds no prediction"),
        ({"seq": 8, "strategy": "first_fit"}, "choose 'best_fit' or 'sequential'"),
        ({"seq": 8, "slack": 2, "strategy": "sequential"}, "use 'best_fit'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        plan_rows(np.array([5, 6]), **options)


def test_a_document_of_2_to_the_31_tokens_is_refused():
    with pytest.raises(ValueError, match="Document 1 has 2147483648 tokens"):
        plan_rows(np.array([5, 2**31]), 1024)


def test_a_row_that_is_not_there():
    with pytest.raises(IndexError, match="There is no row 1: the plan has 1"):
        plan_rows(np.array([5]), 8).segments(1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_million_documents_are_planned_in_seconds_and_in_little_memory(strategy):
    """About one second each of one core's time; what looked at every pair would take days."""
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(6, 1.2, 1_000_000)).astype(np.int64)
    began = time.process_time()
    plan = plan_rows(lengths, 2048, strategy)
    assert time.process_time() - began < 120
    assert plan.predictions == (lengths - 1).sum() and plan.filled > 0.999
    held = sum(array.nbytes for array in (plan.offsets, plan.document, plan.start, plan.stop))
    assert held <= 12 * plan.pieces + 8 * (plan.rows + 1)
