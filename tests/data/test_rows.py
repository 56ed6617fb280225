"""Rows: what a transform may do to them, and how several stores share them."""

from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch
from token_stores import SEQ, VOCAB, make_store, rows_of, together

from shared.course.errors import CourseError
from shared.data.fim import FillInMiddle, FimConfig, FimTokens, undo_fim
from shared.data.loader import PackedLoader
from shared.data.mixture import MixedIndex, MixedLoader, MixedRows
from shared.data.rows import PackedRows
from shared.loss import IGNORED


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), 0)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("other"), 1)


# Transforms.


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def spell(ids) -> str:
    return "".join(map(chr, ids))


def test_fill_in_the_middle_keeps_every_document_and_its_row(store):
    tokens = FimTokens(997, 998, 999, 0)
    transform = FillInMiddle(FimConfig(rate=0.9), letters, spell, tokens)
    loader = PackedLoader(store, seq=SEQ, batch_size=4, epochs=1, transform=transform, slack=4)
    plain = PackedRows(store, SEQ, 0, slack=4)  # three special tokens, and an end token for a piece that had none
    pieces, moved = [], 0
    for step in loader:
        for row in range(4):
            batch = {name: tensor[row] for name, tensor in step[0].items()}
            for number in range(int(batch["documents"].max()) + 1):
                mine = batch["documents"] == number
                ids = [*batch["input_ids"][mine].tolist(), batch["targets"][mine][-1].item()]
                moved += ids[0] == tokens.prefix
                pieces.append(undo_fim(ids, tokens, spell))
    plan, documents, _ = plain.plan(0)
    segments = [segment for row in range(plan.rows) for segment in plan.segments(row)]
    originals = [spell(store.document(documents[s.document])[s.start : s.stop].tolist()).removesuffix("\0") for s in segments]
    assert sorted(pieces) == sorted(originals) and loader.skipped == 0
    assert 0.75 < moved / len(pieces) < 0.98


def test_a_transform_that_does_not_fit_is_left_out_and_counted(store):
    def longer(ids, generator):
        return np.append(ids, ids[-1:].repeat(SEQ))

    loader = PackedLoader(store, seq=SEQ, batch_size=4, epochs=1, transform=longer)
    plain = PackedLoader(store, seq=SEQ, batch_size=4, epochs=1)
    assert torch.equal(rows_of(loader), rows_of(plain))
    assert loader.skipped == PackedRows(store, SEQ, 0).plan(0)[0].pieces


def test_what_a_transform_draws_depends_on_the_place_alone(store):
    def noise(ids, generator):
        return generator.integers(0, VOCAB, len(ids))

    whole = rows_of(PackedLoader(store, seq=SEQ, batch_size=4, transform=noise), 30)
    assert len(whole[:, SEQ : 2 * SEQ].unique(dim=0)) == len(whole)
    ranks = [PackedLoader(store, seq=SEQ, batch_size=2, transform=noise, rank=rank, ranks=2) for rank in range(2)]
    assert torch.equal(together(ranks, 60), whole)


# Mixtures.


def test_a_mixture_keeps_its_shares_of_the_tokens_at_every_moment(store, other):
    loader = MixedLoader({"a": store, "b": other}, {"a": 5, "b": 2}, seq=SEQ, batch_size=1)
    predicted = 0
    for [batch] in islice(loader, 140):
        predicted += int((batch["targets"] != IGNORED).sum())
        given = loader.position
        assert given["a"]["tokens"] + given["b"]["tokens"] == predicted
        assert abs(given["a"]["tokens"] - predicted * 5 / 7) < SEQ


def test_a_mixture_serves_its_stores_rows_in_any_order_of_names(store, other):
    mixed = rows_of(MixedLoader({"a": store, "b": other}, {"a": 0.7, "b": 0.3}, seq=SEQ, batch_size=10), 4)
    turned = rows_of(MixedLoader({"b": other, "a": store}, {"b": 3, "a": 7}, seq=SEQ, batch_size=10), 4)
    assert torch.equal(mixed, turned)
    of_a, of_b = (rows_of(PackedLoader(s, seq=SEQ, batch_size=1), 28 if s is store else 12) for s in (store, other))
    assert sorted(mixed.tolist()) == sorted(torch.cat([of_a, of_b]).tolist())


@pytest.mark.parametrize("weights", [(7, 3), (1, 3, 6), (1, 1, 1)], ids=str)
def test_mixture_ties_follow_exact_arithmetic_and_then_names(store, weights):
    names, given, exact = "abc"[: len(weights)], dict.fromkeys("abc", 0), []
    alone = PackedRows(store, SEQ, 0)
    indices = {name: iter(alone.next_indices(alone.initial_state(), 60)[0]) for name in names}
    for _ in range(60):
        total = sum(given.values()) + SEQ
        behind = {name: Fraction(weight, sum(weights)) * total - given[name] for name, weight in zip(names, weights, strict=True)}
        exact.append(max(names, key=behind.get))
        given[exact[-1]] += alone.token_count(next(indices[exact[-1]]))
    rows = MixedRows({name: PackedRows(store, SEQ, 0) for name in names}, dict(zip(names, weights, strict=True)))
    indices, _ = rows.next_indices(rows.initial_state(), 60)
    assert [index.source for index in indices] == exact


def test_a_mixtures_transform_and_slack_equal_its_stores(store, other):
    options = {"transform": lambda ids, _: ids[::-1], "slack": 9}
    mixed = MixedLoader({"a": store, "b": other}, {"a": 1, "b": 1}, seq=SEQ, batch_size=2, **options).dataset
    alone = {"a": PackedRows(store, SEQ, 0, **options), "b": PackedRows(other, SEQ, 0, **options)}
    indices, _ = mixed.next_indices(mixed.initial_state(), 40)
    assert {index.source for index in indices} == {"a", "b"}
    for source, index in indices:
        expected, found = alone[source].row(index), mixed.row(MixedIndex(source, index))
        assert all(torch.equal(expected.tensors[name], found.tensors[name]) for name in expected.tensors)


def test_mixtures_that_cannot_be_are_refused(store, other, tmp_path):
    foreign = make_store(tmp_path, 2, tokenizer="two")
    for stores, weights, said in (
        ({"a": store, "b": other}, {"a": 1}, "give each source one"),
        ({"a": store, "b": other}, {"a": 1, "b": 0}, "give every source a positive one"),
        ({"a": store, "b": foreign}, {"a": 1, "b": 1}, "different tokenizers"),
    ):
        with pytest.raises(CourseError, match=said):
            MixedLoader(stores, weights, seq=SEQ, batch_size=2)
