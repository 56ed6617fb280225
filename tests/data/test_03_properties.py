"""Property tests of chapter 03's contracts: sentences of the docstrings, held against the solutions on inputs that hypothesis invents."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.data.fim import FimTokens

SOLUTION = importlib.import_module("solutions.03_data_pipeline")
IDS = st.lists(st.integers(0, 4) | st.integers(65_530, 65_540), max_size=30)
ONE_ID = st.integers(0, 3)
TOKENS = FimTokens(prefix=1_200_001, suffix=1_200_002, middle=1_200_003, end=1_200_000)  # no character has such a number
FEW = settings(max_examples=100)


def letters(part: str) -> list[int]:
    return [ord(letter) for letter in part]


@FEW
@given(IDS, ONE_ID, ONE_ID)
def test_a_merge_with_a_fresh_id_loses_nothing_and_leaves_no_pair(ids, left, right):
    before = list(ids)
    merged = SOLUTION.merge_pair(ids, (left, right), 9)
    back = [part for one in merged for part in ((left, right) if one == 9 else (one,))]
    assert ids == before and merged is not ids
    assert back == before and len(merged) == len(before) - merged.count(9)
    assert (left, right) not in list(zip(merged, merged[1:]))


@FEW
@given(st.lists(st.lists(st.integers(0, 70_000), min_size=2, max_size=9), min_size=1, max_size=6), st.integers(0, 5))
def test_a_row_holds_each_prediction_once_in_order_then_padding(documents, room):
    needed = sum(len(ids) - 1 for ids in documents)
    row = SOLUTION.pack_documents([torch.tensor(ids) for ids in documents], needed + room)
    columns = list(zip(*(row[name].tolist() for name in ("input_ids", "targets", "documents", "positions"))))
    wanted = [(*pair, number, place) for number, ids in enumerate(documents) for place, pair in enumerate(zip(ids, ids[1:]))]
    assert columns == wanted + [(0, -100, -1, 0)] * room
    with pytest.raises(ValueError):
        SOLUTION.pack_documents([torch.tensor(ids) for ids in documents], needed - 1)


@FEW
@given(st.text(max_size=20), st.integers(-2, 22), st.integers(-2, 22), st.sampled_from(["psm", "spm", "PSM", ""]))
def test_a_moved_middle_can_be_put_back_and_what_is_wrong_is_refused(text, first, second, mode):
    if mode not in ("psm", "spm") or not 0 <= first <= second <= len(text):
        with pytest.raises(ValueError):
            SOLUTION.fill_in_middle(text, first, second, mode, letters, TOKENS)
        return
    ids = SOLUTION.fill_in_middle(text, first, second, mode, letters, TOKENS)
    marks = [ids.index(token) for token in (TOKENS.prefix, TOKENS.suffix, TOKENS.middle)]
    before, suffix, middle = (ids[start + 1 : stop] for start, stop in zip(marks, [*marks[1:], -1]))
    assert ids[0] == TOKENS.prefix and ids[-1] == TOKENS.end and len(ids) == len(text) + 4
    assert before == ([] if mode == "spm" else letters(text[:first]))
    assert before + middle + suffix == letters(text)


@FEW
@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(1, 3), st.integers(0, 9))
def test_chosen_tokens_are_the_targets_and_others_stay(seed, rate, batch, seq):
    random = torch.Generator().manual_seed(seed)
    ids, replacements = (torch.randint(0, 50, (batch, seq), generator=random) for _ in range(2))
    selection, fate, special = (torch.rand(batch, seq, generator=random) for _ in range(3))
    before = ids.clone()
    inputs, targets = SOLUTION.mask_tokens(ids, special < 0.3, selection, fate, replacements, 77, rate)
    assert torch.equal(ids, before) and inputs.data_ptr() != ids.data_ptr() or not ids.numel()
    for place in range(batch * seq):
        token, seen, target, drawn = (each.flatten()[place].item() for each in (ids, inputs, targets, fate))
        if special.flatten()[place] < 0.3 or selection.flatten()[place] >= rate:
            assert (seen, target) == (token, -100)
        else:
            assert target == token
            assert seen == (77 if drawn < 0.8 else replacements.flatten()[place] if drawn < 0.9 else token)


@FEW
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20), st.permutations(range(100, 112)))
def test_spans_put_back_in_place_of_their_sentinels_are_the_text(tokens, sentinels):
    ids, noise = torch.tensor([token for token, _ in tokens], dtype=torch.int64), torch.tensor([cut for _, cut in tokens], dtype=torch.bool)
    inputs, targets = (each.tolist() for each in SOLUTION.corrupt_spans(ids, noise, sentinels, 1))
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token >= 100:
            spans[token] = current = []
        else:
            current.append(token)
    assert inputs[-1] == targets[-1] == 1
    assert list(spans) == sentinels[: len(spans)] == [token for token in inputs if token >= 100]
    assert [part for token in inputs[:-1] for part in spans.get(token, [token])] == ids.tolist()
    if spans:
        with pytest.raises(ValueError):
            SOLUTION.corrupt_spans(ids, noise, sentinels[: len(spans) - 1], 1)
