"""BERT's and T5's tasks around their exercises: what is drawn, what is never touched, and what is refused."""

from itertools import groupby

import pytest
import torch

from shared.data.masking import Masking
from shared.data.packing import pack_documents
from shared.data.spans import SpanConfig, SpanCorruption, random_parts, random_spans

END, MASK = 1, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed() -> dict[str, torch.Tensor]:
    texts = [torch.cat([torch.randint(5, 97, (size,), generator=generator(size)), torch.tensor([END])]) for size in (40, 21, 17)]
    row = pack_documents(texts, 97)
    return {name: tensor[None] for name, tensor in row.items()}


def test_masking_touches_neither_special_tokens_nor_padding():
    task, batch = Masking(MASK, special_ids=(0, END, 2), vocab_size=97, rate=0.9), packed()
    batch["input_ids"][0, 5] = END
    found = task(batch, generator())
    never = (batch["documents"] < 0) | (batch["input_ids"] == END)
    assert torch.equal(found["input_ids"][never], batch["input_ids"][never]) and (found["targets"][never] == -100).all()
    chosen = found["targets"] != -100
    assert torch.equal(found["targets"][chosen], batch["input_ids"][chosen]) and chosen.sum() > 50
    assert torch.equal(found["input_ids"][~chosen], batch["input_ids"][~chosen])
    assert found["documents"] is batch["documents"] and found["positions"] is batch["positions"]


def test_random_tokens_are_never_special():
    task = Masking(MASK, special_ids=(0, END, 2), vocab_size=97, rate=1.0)
    rows = {"input_ids": torch.full((50, 97), 50)}
    found = task(rows, generator())["input_ids"]
    assert not set(found[found != MASK].tolist()) & {0, END, 2}
    assert len(set(found.flatten().tolist())) > 80


def test_masks_are_new_each_time_and_the_same_for_the_same_generator():
    task, batch = Masking(MASK, (0, END, 2), 97), packed()
    once, again, after = task(batch, left := generator(4)), task(batch, generator(4)), task(batch, left)
    assert torch.equal(once["input_ids"], again["input_ids"]) and not torch.equal(once["targets"], after["targets"])


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rate": 0}, "rate is 0"), ({"rate": 1.2}, "rate is 1.2"), ({"vocab_size": 4}, "All 4 tokens are special")],
)
def test_a_masking_without_effect_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Masking(**{"mask_id": MASK, "special_ids": (0, 1, 2), "vocab_size": 97} | options)


@pytest.mark.parametrize(("inputs", "raw", "targets"), [(512, 568, 114), (1024, 1137, 229), (256, 284, 58)])
def test_span_corruption_input_and_target_lengths_equal_t5(inputs, raw, targets):
    """T5's own helper (`compute_input_and_target_lengths`) gives these; they were recorded from a run of it."""
    config = SpanConfig()
    assert config.raw_length(inputs) == raw
    assert config.sizes(raw) == (inputs, targets)
    assert config.sizes(raw + 1)[0] > inputs


@pytest.mark.parametrize("length", [2, 3, 10, 97, 568])
def test_random_spans_have_the_announced_counts(length):
    config = SpanConfig()
    noise, spans = config.counts(length)
    for seed in range(20):
        runs = [(cut, len(list(run))) for cut, run in groupby(random_spans(length, config, generator(seed)).tolist())]
        assert [cut for cut, _ in runs] == [False, True] * spans  # a kept run first, so that every span has its neighbour
        assert sum(size for cut, size in runs if cut) == noise and sum(size for _, size in runs) == length


def test_all_ways_of_cutting_are_equally_likely():
    """Five tokens in three parts: 6 ways, each in 1/6 of 6,000 draws to within five standard deviations, 2.4 %."""
    left = generator()
    drawn = [tuple(random_parts(5, 3, left).tolist()) for _ in range(6000)]
    shares = {way: drawn.count(way) / 6000 for way in set(drawn)}
    assert len(shares) == 6 and all(sum(way) == 5 and min(way) >= 1 for way in shares)
    assert max(abs(share - 1 / 6) for share in shares.values()) < 0.024


def test_a_corrupted_text_has_the_announced_sizes():
    config = SpanConfig()
    task = SpanCorruption(config, sentinels=list(range(999, 899, -1)), end_id=END)
    text = torch.randint(5, 97, (284,), generator=generator())
    for ids in (text, torch.cat([text, torch.tensor([END])])):
        inputs, targets = task(ids, generator(3))
        assert (len(inputs), len(targets)) == config.sizes(284) == (256, 58)
        assert inputs[-1] == targets[-1] == END and (inputs == END).sum() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [({"density": 0.0}, "density is 0.0"), ({"density": 1.0}, "density is 1.0"), ({"mean_length": 0.5}, "mean_length is 0.5")],
)
def test_spans_that_leave_nothing_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SpanConfig(**options)


def test_texts_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="A text of 1 tokens cannot lose a span"):
        random_spans(1, SpanConfig(), generator())
    with pytest.raises(ValueError, match="An input of 2 tokens is too short"):
        SpanConfig().raw_length(2)
    with pytest.raises(ValueError, match="sentinels"):
        SpanCorruption(SpanConfig(), [99], END)(torch.arange(5, 97), generator())
