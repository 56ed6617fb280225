"""Rows of conversations: only answers are targets, none sees another; resumable; the loss is that of the tokens, however they are split."""

import json
import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.course.errors import CourseError
from shared.data.objectives import encoder_decoder_objective
from shared.data.rows import stack_rows
from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.encoding import PairExamples
from shared.finetune.chat.prepare import ChatConfig, ChatSource, prepare_chats
from shared.finetune.chat.rows import chat_loaders, longest_read
from shared.loop import accumulate_gradients
from shared.loss import IGNORED
from shared.model.chunked_loss import apart, packed_next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from tests.support import chat_templates as published

SEQ = 96
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Conversations of one to three turns, some longer than a row, and the same as pairs."""
    folder, draw = tmp_path_factory.mktemp("chats"), random.Random(0)
    records = []
    for number in range(40):
        turns = [("user", f"What is {number}? " * draw.randrange(1, 4)), ("assistant", "It is four. " * draw.randrange(1, 6))]
        records.append({"messages": [{"role": role, "content": text} for role, text in turns * draw.randrange(1, 4)]})
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source, model = (ChatSource(str(folder / "a.jsonl")),), published.save_tokenizer(folder / "model")
    kinds = {kind: ChatConfig(source, kind, model, held_out_share=0.2) for kind in ("chatml", "pairs")}
    return {kind: prepare_chats(config, folder / "out", SEQ) for kind, config in kinds.items()}


def loaders_of(chats, **options):
    return chat_loaders(chats, **{"seq": SEQ, "batch_size": 4, "micro_batch_size": 2, "seed": 3, "start_id": 0} | options)


def rows_of(loader, steps=None):
    batches = [batch for step in islice(loader, steps) for batch in step]
    return [{name: batch[name][row] for name in batch} for batch in batches for row in range(len(batch["targets"]))]


def model_of(vocab_size, **options):
    torch.manual_seed(0)
    return TransformerModel(ModelConfig(vocab_size=vocab_size, **SIZES | options)).double().eval()


def test_each_conversation_stands_whole_in_one_row_and_only_its_answers_are_targets(made):
    chats = made["chatml"]
    assert chats.report.truncated > 3
    training, _ = loaders_of(chats, epochs=1)
    found = []
    for row in rows_of(training):
        for document in range(int(row["documents"].max()) + 1):
            inside = row["documents"] == document
            assert row["positions"][inside].tolist() == list(range(int(inside.sum())))
            found.append((row["input_ids"][inside].tolist(), row["targets"][inside].tolist()))
    wanted = []
    for number in range(len(chats.training)):
        ids, trained = chats.training.document(number).tolist(), chats.training.trained(number).tolist()
        wanted.append((ids[:-1], [number if mark else IGNORED for number, mark in zip(ids[1:], trained[1:], strict=True)]))
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("kind", ["chatml", "pairs"])
def test_every_held_out_token_is_evaluated_once_over_any_ranks(kind, made):
    chats = made[kind]
    wanted = sum(int(chats.held_out.trained(number)[1:].sum()) for number in range(len(chats.held_out)))
    size = sum(
        int(chats.tokenizer.byte_lengths[chats.held_out.document(number)[1:][chats.held_out.trained(number)[1:]]].sum())
        for number in range(len(chats.held_out))
    )
    for ranks in (1, 2, 3):
        parts = [loaders_of(chats, rank=rank, ranks=ranks, batch_size=6)[1] for rank in range(ranks)]
        assert len({len(list(part)) for part in parts}) == 1
        assert sum(int((batch["targets"] != IGNORED).sum()) for part in parts for batch in part) == wanted
        assert sum(part.byte_count(chats.tokenizer.byte_lengths) for part in parts) == size


def test_changing_one_conversation_leaves_the_others_logits_and_loss(made):
    model = model_of(made["chatml"].tokenizer.vocab_size)
    row = next(row for row in rows_of(loaders_of(made["chatml"])[0], 20) if row["documents"].max() >= 1)
    batch = stack_rows([row])
    inside = row["documents"] == 0
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, inside] = batch["input_ids"][0, inside].flip(0)
    with torch.no_grad():
        before, after = (model(each["input_ids"], **apart(each))[0] for each in (batch, changed))
    assert torch.equal(before[~inside], after[~inside]) and not torch.allclose(before[inside], after[inside])
    alone = F.cross_entropy(before, row["targets"], ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(packed_next_token_objective(model, batch).loss_sum, alone, rtol=1e-12, atol=0)


def gradients(model, shares, objective):
    """The loss and the gradients of shares of a step, each in micro-batches: summed over all, divided once by the tokens of all."""
    total = torch.zeros((), dtype=torch.float64)
    sums, tokens = [torch.zeros_like(parameter) for parameter in model.parameters()], 0
    for share in shares:
        model.zero_grad(set_to_none=True)
        totals = accumulate_gradients(model, share, objective)
        total, tokens = total + totals.loss_sum, tokens + int(totals.token_count)
        sums = [one + parameter.grad for one, parameter in zip(sums, model.parameters(), strict=True)]
    return total / tokens, [one / tokens for one in sums], tokens


@settings(max_examples=8)
@given(st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2]), st.integers(0, 20), st.booleans())
def test_uneven_masks_weigh_tokens_over_any_micro_batches_and_ranks(made, ranks, micro_batch_size, seed, lonely):
    """Also where a rank's rows hold no answer at all."""
    chats = made["chatml"]
    model = model_of(chats.tokenizer.vocab_size)
    [whole] = next(iter(loaders_of(chats, batch_size=6, micro_batch_size=6, seed=seed)[0]))
    shares = [
        next(iter(loaders_of(chats, batch_size=6, micro_batch_size=micro_batch_size, seed=seed, rank=rank, ranks=ranks)[0]))
        for rank in range(ranks)
    ]
    if lonely:
        whole["targets"][: 6 // ranks] = IGNORED if ranks > 1 else whole["targets"]
        for batch in shares[0] if ranks > 1 else []:
            batch["targets"][:] = IGNORED
    loss, wanted, tokens = gradients(model, [[whole]], packed_next_token_objective)
    split_loss, found, split_tokens = gradients(model, shares, packed_next_token_objective)
    assert tokens == split_tokens
    torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["chatml", "pairs"])
def test_a_resumed_run_sees_the_rows_that_the_first_would_have_seen(kind, made):
    whole = rows_of(loaders_of(made[kind])[0], 25)
    for steps, ranks in ((0, 1), (3, 2), (7, 4), (9, 1), (16, 2)):
        first = loaders_of(made[kind])[0]
        list(islice(first, steps))
        state = json.loads(json.dumps(first.state_dict()))
        others = [loaders_of(made[kind], rank=rank, ranks=ranks, micro_batch_size=1)[0] for rank in range(ranks)]
        for loader in others:
            loader.load_state_dict(state)
        shares = [rows_of(loader, 2) for loader in others]
        each = 4 // ranks
        found = [row for step in range(2) for share in shares for row in share[step * each : (step + 1) * each]]
        for row, wanted in zip(found, whole[4 * steps :], strict=False):
            assert all(torch.equal(row[name], wanted[name]) for name in wanted)


def test_virtual_tokens_come_before_each_conversation_and_are_no_targets(made):
    chats, ids = made["chatml"], [1000, 1001, 1002]
    training, held_out = loaders_of(chats, seq=SEQ + 3, virtual_ids=ids, epochs=1)
    targets = 0
    for row in [*rows_of(training), *rows_of([list(held_out)])]:
        for document in range(int(row["documents"].max()) + 1):
            inside = row["documents"] == document
            assert row["input_ids"][inside][:3].tolist() == ids and (row["targets"][inside][:2] == IGNORED).all()
        assert (row["input_ids"] >= 1000).sum() == 3 * (row["documents"].max() + 1)
        targets += int((row["targets"] != IGNORED).sum())
    assert targets == chats.report.trained
    with pytest.raises(CourseError, match=f"holds conversations of {SEQ + 3} tokens behind 3 virtual tokens, and a row takes {SEQ}"):
        loaders_of(chats, virtual_ids=ids)
    with pytest.raises(CourseError, match=f"holds conversations of {SEQ} tokens, and a row takes {SEQ - 1}"):
        loaders_of(chats, seq=SEQ - 1)


def test_pairs_are_read_and_written_and_the_loss_is_that_of_the_written_text(made):
    """Against torch's cross-entropy of the pair alone, without any padding."""
    chats = made["pairs"]
    model = model_of(chats.tokenizer.vocab_size, architecture="encoder-decoder", position="relative")
    training, _ = loaders_of(chats, epochs=1)
    steps = [[{name: value.clone() for name, value in batch.items()} for batch in step] for step in training]
    assert len(chats.training) % 4, "the last step has rows of padding"
    loss, _, tokens = gradients(model, steps, encoder_decoder_objective)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number in range(len(chats.training)):
        ids, first = torch.tensor(chats.training.document(number).tolist()), int(chats.training.trained(number).argmax())
        read, written = ids[:first], ids[first:]
        assert read[-1] == written[-1] == chats.tokenizer.end_id and len(read) <= SEQ and len(written) <= SEQ
        late = torch.cat([torch.tensor([0]), written[:-1]])
        with torch.no_grad():
            logits = model(read[None], decoder_input_ids=late[None])[0]
        total, count = total + F.cross_entropy(logits, written, reduction="sum"), count + len(written)
    assert tokens == count == sum(int(chats.training.trained(number).sum()) for number in range(len(chats.training)))
    torch.testing.assert_close(loss, total / count, rtol=1e-10, atol=0)
    with pytest.raises(CourseError, match="Pairs of texts are for an encoder-decoder"):
        loaders_of(chats, start_id=None)


class OnePair:
    """A store of one pair of texts."""

    def __init__(self, read: int, written: int):
        self.lengths, self.marks = np.array([read + written]), np.arange(read + written) >= read

    def __len__(self):
        return 1

    def trained(self, number):
        return self.marks


@pytest.mark.parametrize(("read", "written"), [(SEQ + 3, 4), (4, SEQ + 3)])
def test_a_pair_that_is_too_long_on_either_side_is_refused(read, written, made):
    chats = replace(made["pairs"], training=OnePair(read, written))
    with pytest.raises(CourseError, match=f"holds conversations of {SEQ + 3} tokens, and a row takes {SEQ + 2}"):
        loaders_of(chats, seq=SEQ + 2)
    assert longest_read(chats.training) == SEQ + 3


def test_a_text_that_is_read_keeps_its_end_when_it_is_cut_and_one_that_is_written_does_not(made):
    long = "It is four, and two more are six. " * 40
    examples, end = PairExamples(made["pairs"].tokenizer, SEQ), made["pairs"].tokenizer.end_id
    words = made["pairs"].tokenizer.encode(long)
    talk = Conversation("a.jsonl:1", [{"role": "user", "content": long}, {"role": "assistant", "content": long}])
    [example] = examples([talk])
    read, written = example.ids[~example.trained].tolist(), example.ids[example.trained].tolist()
    assert read == [*words[: SEQ - 1], end] and written == list(words[:SEQ]) and end not in written
    assert example.length == 2 * len(words) + 2 > 2 * SEQ
    short = replace(talk, messages=[{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "é"}])
    assert [each.byte_count for each in examples([talk, short, talk])] == [2 * len(long), 6, 2 * len(long)]


def test_rows_behind_other_virtual_tokens_are_not_resumed(made):
    first, other = (loaders_of(made["chatml"], seq=SEQ + 3, virtual_ids=range(1000, stop))[0] for stop in (1003, 1002))
    with pytest.raises(CourseError):
        other.load_state_dict(first.state_dict())
