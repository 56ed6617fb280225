"""The loader: every row once, the same rows on any number of ranks and after any interruption, and nothing that hangs."""

import json
import random
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from token_stores import (
    NAMES,
    SEQ,
    VOCAB,
    expected_predictions,
    make_store,
    predictions,
    rows_of,
    together,
)

from shared.course.errors import CourseError
from shared.data.loader import EvaluationLoader, PackedLoader, prefetch
from shared.data.mixture import MixedLoader
from shared.data.packing import PADDING
from shared.data.rows import PackedRows
from shared.data.shards import ENDING, TokenStore, write_shard
from shared.loss import IGNORED


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), 0)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("other"), 1)


# One rank.


def test_batches_have_the_promised_names_shapes_and_sizes(store):
    loader = PackedLoader(store, seq=SEQ, batch_size=7, micro_batch_size=3)
    step = next(iter(loader))
    assert [batch["input_ids"].shape for batch in step] == [(3, SEQ), (3, SEQ), (1, SEQ)]
    assert all(set(batch) == NAMES and {tensor.dtype for tensor in batch.values()} == {torch.int64} for batch in step)


def test_an_epoch_holds_every_prediction_once_and_the_next_in_another_order(store):
    def epoch_of(epochs):
        loader = PackedLoader(store, seq=SEQ, batch_size=4, epochs=epochs)
        return [batch for step in loader for batch in step]

    one, two = epoch_of(1), epoch_of(2)
    assert predictions(one) == expected_predictions(store)
    assert predictions(two) == sorted(expected_predictions(store) * 2)
    first, second = (torch.cat([batch["input_ids"] for batch in part]) for part in (one, two))
    rest = second[len(first) - 4 :][: len(first)]
    assert torch.equal(first[:-4], second[: len(first) - 4]) and not torch.equal(first[: len(rest)], rest)


def test_the_last_step_is_filled_with_rows_that_count_nothing(store):
    rows = PackedRows(store, SEQ, seed=0).plan(0)[0].rows
    loader = PackedLoader(store, seq=SEQ, batch_size=rows - 2, epochs=1, seed=0)
    steps = list(loader)
    assert [len(step[0]["targets"]) for step in steps] == [rows - 2] * 2 and loader.sample == rows
    padding = {name: tensor[2:] for name, tensor in steps[-1][0].items()}
    assert (padding["targets"] == IGNORED).all() and (padding["documents"] == PADDING).all() and not padding["input_ids"].any()


def test_a_run_that_stops_exactly_at_an_epochs_end_goes_on_with_the_next(store):
    rows = PackedRows(store, SEQ, seed=0).plan(0)[0].rows
    whole = rows_of(PackedLoader(store, seq=SEQ, batch_size=rows, seed=0), 3)
    first, resumed = (PackedLoader(store, seq=SEQ, batch_size=rows, seed=0) for _ in range(2))
    assert len(list(islice(first, 1))) == 1 and first.sample == rows
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(rows_of(resumed, 2), whole[rows:])


def test_seeds_differ_and_repeat(store):
    first, again, other_seed = (rows_of(PackedLoader(store, seq=SEQ, batch_size=5, seed=seed), 4) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other_seed)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_working_ahead_changes_no_row(store, prefetch):
    plain = rows_of(PackedLoader(store, seq=SEQ, batch_size=5, prefetch=0), 40)
    assert torch.equal(rows_of(PackedLoader(store, seq=SEQ, batch_size=5, prefetch=prefetch), 40), plain)


# Ranks and resuming.


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_ranks_share_the_rows_of_one(store, ranks):
    alone = rows_of(PackedLoader(store, seq=SEQ, batch_size=6), 30)
    shared = [PackedLoader(store, seq=SEQ, batch_size=6, micro_batch_size=1, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert torch.equal(together(shared, 30), alone)
    assert len({json.dumps(loader.state_dict()) for loader in shared}) == 1, "the state is global"


def make(kind: str, store, other, **options):
    if kind == "packed":
        return PackedLoader(store, seq=SEQ, **options)
    return MixedLoader({"a": store, "b": other}, {"a": 0.7, "b": 0.3}, seq=SEQ, **options)


@pytest.mark.parametrize("kind", ["packed", "mixed"])
def test_a_resumed_run_sees_the_rows_that_the_first_would_have_seen(store, other, kind):
    """Wherever it stops, around the ends of epochs too, and with whatever ranks, batch sizes and prefetch it goes on."""
    whole = rows_of(make(kind, store, other, batch_size=4, seed=5), 100)
    epoch = PackedRows(store, SEQ, seed=5).plan(0)[0].rows
    draw = random.Random(0)
    for trial in range(20):
        batch_size = draw.choice([1, 3, 4, 12])
        steps = draw.choice([draw.randrange(0, 150), epoch + draw.randrange(-1, 2)]) // batch_size
        first = make(kind, store, other, batch_size=batch_size, seed=5, prefetch=draw.randrange(3))
        list(islice(first, steps))
        state = json.loads(json.dumps(first.state_dict()))
        assert state["sample"] == steps * batch_size and len(json.dumps(state)) < 1500
        ranks = draw.choice([1, 2, 4])
        options = {"batch_size": 4, "micro_batch_size": draw.choice([1, 2]), "ranks": ranks, "seed": 5, "prefetch": draw.randrange(3)}
        others = [make(kind, store, other, rank=rank, **options) for rank in range(ranks)]
        for loader in others:
            loader.load_state_dict(state)
        begin = steps * batch_size
        assert torch.equal(together(others, 30), whole[begin : begin + 120]), (trial, begin, options)
        assert {loader.state_dict()["sample"] for loader in others} == {begin + 120}


def test_what_was_only_prefetched_was_not_seen(store):
    loader = PackedLoader(store, seq=SEQ, batch_size=2, prefetch=5)
    steps = iter(loader)
    next(steps)
    assert loader.sample == 2
    seen = rows_of(loader, 1)
    assert torch.equal(seen, rows_of(PackedLoader(store, seq=SEQ, batch_size=2), 2)[2:]), "iterating anew goes on, skipping nothing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "its seed was 0, here it is 1"),
        ({"seq": SEQ + 1}, f"its seq was {SEQ}, here it is {SEQ + 1}"),
        ({"strategy": "sequential"}, "its strategy was 'best_fit', here it is 'sequential'"),
        ({"transform": lambda ids, generator: ids}, "its transform was None, here it is '<lambda>"),
        ({"store": "other"}, "its data was '"),
    ],
)
def test_a_state_of_other_data_is_refused_by_name(store, other, change, said):
    state = PackedLoader(store, seq=SEQ, batch_size=2).state_dict()
    changed = {"store": store, "seq": SEQ} | change
    changed["store"] = other if changed["store"] == "other" else store
    with pytest.raises(CourseError, match=said):
        PackedLoader(changed.pop("store"), batch_size=2, **changed).load_state_dict(state)


@pytest.mark.parametrize(("batch_size", "ranks"), [(16, 3), (7, 4), (2, 3)])
def test_ranks_that_do_not_divide_a_batch_share_its_rows_in_order_and_run_equal_micro_batches(store, batch_size, ranks):
    whole = next(iter(PackedLoader(store, seq=SEQ, batch_size=batch_size)))[0]["input_ids"]
    loaders = [PackedLoader(store, seq=SEQ, batch_size=batch_size, micro_batch_size=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    steps = [next(iter(loader)) for loader in loaders]
    assert len({tuple(batch["input_ids"].shape for batch in step) for step in steps}) == 1
    assert len({batch["input_ids"].shape for batch in steps[0]}) == 1 and len(steps[0][0]["input_ids"]) <= 4
    rows = [torch.cat([batch["input_ids"][(batch["targets"] != IGNORED).any(1)] for batch in step]) for step in steps]
    assert torch.equal(torch.cat(rows), whole) and max(map(len, rows)) - min(map(len, rows)) <= 1


def test_sizes_that_cannot_be_are_refused(store):
    for options, said in (
        ({"batch_size": 4, "ranks": 2, "rank": 2}, "There is no rank 2 among 2"),
        ({"batch_size": 0}, "give at least 1 of each"),
    ):
        with pytest.raises(CourseError, match=said):
            PackedLoader(store, seq=SEQ, **options)


def test_a_store_without_a_prediction_is_refused(tmp_path):
    write_shard(tmp_path / f"0{ENDING}", [[0], []], [0, 0], "one", VOCAB)
    for make_loader in (lambda s: PackedLoader(s, seq=SEQ, batch_size=1), lambda s: EvaluationLoader(s, seq=SEQ, batch_size=1)):
        with pytest.raises(CourseError, match="there is nothing to predict"):
            make_loader(TokenStore(tmp_path))


# Evaluation.


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_evaluation_takes_every_token_once_with_equally_many_batches_on_each_rank(store, ranks):
    loaders = [EvaluationLoader(store, seq=SEQ, batch_size=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert predictions(batch for of_rank in batches for batch in of_rank) == expected_predictions(store)
    assert len({tuple(len(batch["targets"]) for batch in of_rank) for of_rank in batches}) == 1
    assert [len(loader) for loader in loaders] == [len(of_rank) for of_rank in batches]
    widths = np.arange(VOCAB)
    counted = sum(loader.byte_count(widths) for loader in loaders)
    assert counted == sum(int(store.document(i)[1:].sum()) for i in range(len(store)))


def test_a_limited_evaluation_is_spread_over_the_store(store):
    every, some = (EvaluationLoader(store, seq=SEQ, batch_size=3, limit=limit) for limit in (None, 7))
    assert len(some.rows) == 7 and [len(batch["targets"]) for batch in some] == [3, 3, 1]
    assert some.rows[0] == 0 and some.rows[-1] >= len(every.rows) * 6 // 7
    assert torch.equal(next(iter(some))["input_ids"], next(iter(some))["input_ids"]), "each pass begins anew"


# The thread.


def test_an_error_in_the_thread_comes_out_where_the_batches_are_taken(store):
    def fails(ids, generator):
        raise ZeroDivisionError("in the thread")

    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(iter(PackedLoader(store, seq=SEQ, batch_size=2, transform=fails)))


def test_stopping_the_data_loader_early_leaves_no_thread(store):
    before = set(threading.enumerate())
    for _ in PackedLoader(store, seq=SEQ, batch_size=2):
        assert len(set(threading.enumerate()) - before) == 1
        break
    with pytest.raises(KeyError):
        for _ in PackedLoader(store, seq=SEQ, batch_size=2):
            raise KeyError
    assert not set(threading.enumerate()) - before


def test_no_more_is_made_ahead_than_was_asked_for():
    made = []
    values = prefetch((made.append(i) or i for i in range(100)), 3)
    assert next(values) == 0
    for _ in range(12_000):
        if len(made) >= 5:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)  # one that made more would have the time here
    assert len(made) == 5, "one taken, three waiting, one in hand"
    assert list(values) == list(range(1, 100))
