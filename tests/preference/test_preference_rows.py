"""Rows of pairs: no pair is split, no answer sees another, slots say whose margin or label it is; resumable on any ranks."""

import json
import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from shared.course.errors import CourseError
from shared.data.packing import plan_rows
from shared.data.rows import stack_rows
from shared.finetune.chat.datasets import ChatSource
from shared.loss import IGNORED
from shared.model.chunked_loss import apart
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.preference.config import PreferenceConfig
from shared.preference.prepare import prepare_preferences
from shared.preference.reference import ReferencedDocuments
from shared.preference.rows import compared_documents, preference_loaders
from tests.support import chat_templates as published

SEQ = 112
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Pairs of uneven lengths, some cut to the row, with margins; and single answers with labels."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    words = lambda most: "It is four. " * draw.randrange(1, most)
    pairs = [{"prompt": f"{n}? {words(4)}", "chosen": words(14), "rejected": f"No {n}. {words(3)}", "margin": n / 8} for n in range(50)]
    single = [{"prompt": f"{n}? {words(4)}", "completion": words(9), "label": bool(draw.randrange(2))} for n in range(50)]
    found, model = {}, published.save_tokenizer(folder / "model")
    for kind, records in (("pairs", pairs), ("single", single)):
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        config = PreferenceConfig((ChatSource(str(folder / f"{kind}.jsonl")),), tokenizer=model, held_out_share=0.2)
        found[kind] = prepare_preferences(config, folder / "out", SEQ)
    return found


def loaders_of(prepared, **options):
    return preference_loaders(prepared, **{"seq": SEQ, "batch_size": 4, "micro_batch_size": 2, "seed": 3} | options)


def rows_of(loader, steps=None):
    batches = [batch for step in islice(loader, steps) for batch in step]
    return [{name: batch[name][row] for name in batch} for batch in batches for row in range(len(batch["targets"]))]


def sequences(row):
    """For each sequence of a row its number, its inputs and its targets."""
    for place, number in enumerate(row["numbers"][row["numbers"] >= 0].tolist()):
        inside = row["documents"] == place
        assert row["positions"][inside].tolist() == list(range(int(inside.sum()))) and inside.any()
        yield number, row["input_ids"][inside].tolist(), row["targets"][inside].tolist()


def wanted_of(store, number, whole):
    ids, trained = store.document(number).tolist(), store.trained(number).tolist()
    targets = [one if mark else IGNORED for one, mark in zip(ids[1:], trained[1:], strict=True)]
    return (ids, [*targets, IGNORED]) if whole else (ids[:-1], targets)


@pytest.mark.parametrize("whole", [False, True])
def test_every_pair_stands_whole_in_one_row_once_an_epoch(made, whole):
    prepared = made["pairs"]
    assert prepared.report.truncated >= 3
    training, held_out = loaders_of(prepared, epochs=1, whole=whole)
    for loader, store in ((rows_of(training), prepared.training), (rows_of([list(held_out)]), prepared.held_out)):
        numbers = []
        for row in loader:
            assert all(value.shape == (SEQ,) for value in row.values())
            found = list(sequences(row))
            assert len(found) == int(row["documents"].max()) + 1 and len(found) % 2 == 0
            for (chosen, *_), (rejected, *_) in zip(found[::2], found[1::2], strict=True):
                assert chosen % 2 == 0 and rejected == chosen + 1
            for number, ids, targets in found:
                assert (ids, targets) == wanted_of(store, number, whole)
            margins = [float(store.values[number]) for number, *_ in found[::2]]
            assert row["margins"].tolist() == margins + [0.0] * (SEQ - len(margins))
            numbers += [number for number, *_ in found]
        assert sorted(numbers) == list(range(len(store)))


def test_rows_are_planned_by_best_fit_over_pairs(made):
    """As chapter 03 plans documents that are as long as both answers together."""
    rows = loaders_of(made["pairs"])[0].dataset
    sizes = (made["pairs"].training.lengths - 1).reshape(-1, 2).sum(1)
    for epoch in (0, 1):
        _, order, _ = rows.plan(epoch)
        wanted = plan_rows(sizes[order] + 1, SEQ)
        assert rows.plan(epoch)[0].filled == wanted.filled and rows.rows == wanted.rows
    assert wanted.predictions == sizes.sum()


@pytest.mark.parametrize("kind", ["pairs", "single"])
def test_single_answers_have_labels_and_pairs_can_be_taken_apart(made, kind):
    prepared = made[kind]
    for row in rows_of(loaders_of(prepared, epochs=1, answers=True)[0]):
        found = list(sequences(row))
        labels = [1 - number % 2 if kind == "pairs" else int(prepared.training.values[number]) for number, *_ in found]
        assert row["desirable"].tolist() == labels + [-1] * (SEQ - len(labels)) and "margins" not in row
        assert all((ids, targets) == wanted_of(prepared.training, number, False) for number, ids, targets in found)
    if kind == "single":
        with pytest.raises(CourseError, match="holds single answers, and pairs are compared here"):
            loaders_of(prepared)


def test_changing_one_answer_leaves_the_logits_of_all_others(made):
    torch.manual_seed(0)
    model = TransformerModel(ModelConfig(vocab_size=made["pairs"].tokenizer.vocab_size, **SIZES)).double().eval()
    row = next(row for row in rows_of(loaders_of(made["pairs"])[0], 20) if row["documents"].max() >= 3)
    batch = stack_rows([row])
    for place in range(4):
        inside = row["documents"] == place
        changed = batch | {"input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, inside] = batch["input_ids"][0, inside].flip(0)
        with torch.no_grad():
            before, after = (model(each["input_ids"], **apart(each))[0] for each in (batch, changed))
        assert torch.equal(before[~inside], after[~inside]) and not torch.allclose(before[inside], after[inside])


@pytest.mark.parametrize(("kind", "options"), [("pairs", {}), ("pairs", {"whole": True}), ("single", {"answers": True})])
def test_a_resumed_run_sees_the_rows_that_the_first_would_have_seen(made, kind, options):
    """Over the end of an epoch, on other ranks, with other micro-batches."""
    whole = rows_of(loaders_of(made[kind], **options)[0], 14)
    for steps, ranks in ((0, 1), (3, 2), (7, 4), (12, 1)):
        first = loaders_of(made[kind], **options)[0]
        list(islice(first, steps))
        state = json.loads(json.dumps(first.state_dict()))
        others = [loaders_of(made[kind], rank=rank, ranks=ranks, micro_batch_size=1, **options)[0] for rank in range(ranks)]
        for loader in others:
            loader.load_state_dict(state)
        shares = [rows_of(loader, 2) for loader in others]
        each = 4 // ranks
        found = [row for step in range(2) for share in shares for row in share[step * each : (step + 1) * each]]
        for row, wanted in zip(found, whole[4 * steps :], strict=False):
            assert row.keys() == wanted.keys() and all(torch.equal(row[name], wanted[name]) for name in wanted)
    with pytest.raises(CourseError, match="its data was"):
        loaders_of(made["pairs"], answers=True, whole=True)[0].load_state_dict(first.state_dict())


def test_every_held_out_pair_is_evaluated_once_over_any_ranks(made):
    store = made["pairs"].held_out
    for ranks in (1, 2, 3):
        parts = [list(loaders_of(made["pairs"], rank=rank, ranks=ranks, batch_size=6)[1]) for rank in range(ranks)]
        assert len({len(part) for part in parts}) == 1
        numbers = [number for part in parts for batch in part for number in batch["numbers"][batch["numbers"] >= 0].tolist()]
        assert sorted(numbers) == list(range(len(store)))


class Known(ReferencedDocuments):
    """Documents that know a reference's log-probabilities: minus the place of each token, and the document's number in the hundreds."""

    def __init__(self, store):
        super().__init__(store, np.zeros(store.token_count, np.float32), "known")

    def reference(self, number):
        return (-np.arange(self.store.lengths[number]) - 100.0 * number).astype(np.float32)


@pytest.mark.parametrize("virtual", [(), (1000, 1001, 1002)])
def test_reference_log_probabilities_stand_at_the_targets(made, virtual):
    prepared = replace(made["pairs"], training=Known(made["pairs"].training))
    rows = rows_of(loaders_of(prepared, epochs=1, virtual_ids=virtual, seq=SEQ + 2 * len(virtual))[0])
    for row in rows:
        for place, number in enumerate(row["numbers"][row["numbers"] >= 0].tolist()):
            inside = row["documents"] == place
            assert row["input_ids"][inside][: len(virtual)].tolist() == list(virtual)
            trained, known = prepared.training.trained(number), prepared.training.reference(number)
            assert row["reference"][inside & (row["targets"] != IGNORED)].tolist() == known[trained].tolist()
    assert all((row["reference"][row["targets"] == IGNORED] == 0).all() for row in rows)
    assert "reference" not in rows_of([list(loaders_of(prepared)[1])])[0]


def test_pairs_that_are_longer_than_a_row_are_refused(made):
    with pytest.raises(CourseError, match=r"holds pairs of \d+ tokens, and a row takes 60: prepare them for shorter rows"):
        loaders_of(made["pairs"], seq=60)
    with pytest.raises(CourseError, match="holds pairs behind 9 virtual tokens of"):
        compared_documents(made["pairs"], False, SEQ, virtual_ids=range(9))
