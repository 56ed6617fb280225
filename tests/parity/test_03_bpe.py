"""Our BPE beside two libraries: the merges that `tokenizers` learns from real source, and tiktoken's encoding by our own merges."""

import json

import pytest
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from shared.corpus import embedded_corpus
from shared.data.bpe import BytePairEncoding, WordCounts, train_bpe

MERGES = 300
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
STRANGE = "naïve 漢字かな 😀👩‍👩‍👧  \t\n\n x = f'{y!r}'  # it's  ééé\u2028\x00\x7f end "


def texts() -> list[str]:
    """Real source: 25 files of jinja2."""
    return [document.content.decode() for document in embedded_corpus().training if document.name.startswith("jinja2")]


@pytest.fixture(scope="module")
def ours() -> BytePairEncoding:
    return train_bpe(texts(), 256 + MERGES)


@pytest.fixture(scope="module")
def theirs() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False))
    return made


def merges_of(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    vocabulary = tokenizer.get_vocab()
    return [(vocabulary[left], vocabulary[right]) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def test_bpe_merges_equal_tokenizers(ours, theirs):
    assert list(ours.merges) == merges_of(theirs)
    assert len(ours.merges) == MERGES


def test_another_rule_for_ties_gives_other_merges(theirs, monkeypatch):
    """The negative control: the larger of two equally frequent pairs."""
    monkeypatch.setattr(WordCounts, "most_frequent", lambda counts: max(counts.pairs, key=lambda pair: (counts.pairs[pair], pair)))
    assert list(train_bpe(texts(), 256 + MERGES).merges) != merges_of(theirs)


def tiktoken_of(ours: BytePairEncoding, pattern: str = GPT2_WORDS) -> tiktoken.Encoding:
    ranks = {token: place for place, token in enumerate(ours.tokens)}
    return tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def held_out() -> list[str]:
    return [document.content.decode() for document in embedded_corpus().held_out[:12]]


def test_tiktoken_with_our_merges_gives_the_same_ids(ours):
    encoding = tiktoken_of(ours)
    for text in [STRANGE, *held_out()]:
        assert ours.encode(text) == encoding.encode_ordinary(text)


def test_words_that_are_cut_otherwise_encode_otherwise(ours):
    """The negative control: the same merges without borders between words."""
    assert tiktoken_of(ours, pattern=r"[\s\S]+").encode_ordinary(held_out()[0]) != ours.encode(held_out()[0])


def test_tokenizers_gives_the_same_ids(ours, theirs):
    for text in [STRANGE, *held_out()]:
        assert ours.encode(text) == theirs.encode(text).ids


def test_decoding_gives_the_text_back(ours):
    for text in ["", STRANGE, *held_out()]:
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("漢")[:2]) == "\ufffd"


def test_training_ends_where_nothing_is_left_to_join():
    learned = train_bpe(["ab ab", "ab"], 1000)
    assert [token for token in learned.tokens[256:]] == [b"ab", b" ab"]
    with pytest.raises(ValueError, match="give at least 256"):
        train_bpe(["ab"], 255)
