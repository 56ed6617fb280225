"""Vocabulary extension of a tokenizer: the library's merges, old tokens kept, and refusals in a sentence."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shared.corpus import EMBEDDED, embedded_corpus
from shared.data.tokenizer import TextTokenizer, TokenizerError
from shared.finetune.vocabulary import extend_tokenizer


@pytest.fixture(scope="module")
def texts():
    return [document.content.decode() for document in embedded_corpus(EMBEDDED[3:]).training]


@pytest.fixture(scope="module")
def old(texts):
    return TextTokenizer.train(texts[:4], 600, sentinels=0)


def merges_of(tokenizer: TextTokenizer) -> list:
    return json.loads(tokenizer.to_json())["model"]["merges"]


def test_from_bytes_alone_it_trains_what_the_library_trains(texts):
    of_bytes = TextTokenizer.train(["x"], 266, sentinels=0)
    library = TextTokenizer.train(texts[:10], 266 + 200, sentinels=0)
    ours = extend_tokenizer(of_bytes, texts[:10], 200)
    assert merges_of(ours.tokenizer) == merges_of(library) and len(ours.parts) == 200
    assert ours.tokenizer.encode(texts[11]) == library.encode(texts[11])


def test_old_tokens_keep_their_ids_and_new_ones_join_two_of_them(old, texts):
    extended = extend_tokenizer(old, texts[4:], 50)
    before, after = old.tokenizer.get_vocab(), extended.tokenizer.tokenizer.get_vocab()
    names = {number: token for token, number in after.items()}
    assert all(after[token] == number for token, number in before.items())
    assert list(extended.parts) == list(range(old.vocab_size, old.vocab_size + 50)) and extended.tokenizer.vocab_size == old.vocab_size + 50
    assert all(names[new] == names[left] + names[right] for new, (left, right) in extended.parts.items())
    assert extended.tokenizer.end_id == old.end_id and extended.tokenizer.special_ids == old.special_ids


def test_new_text_takes_fewer_tokens_and_comes_back_whole(old, texts):
    new = "".join(chr(0x430 + ord(c) - 97) if "a" <= c <= "z" else c for c in texts[5])  # in Cyrillic letters, two bytes each
    extended = extend_tokenizer(old, [new], 300).tokenizer
    assert len(extended.encode(new)) < 0.5 * len(old.encode(new))
    assert extended.decode(extended.encode(new)) == new
    extended.require_lossless([new])


def test_it_is_the_same_for_the_same_text(old, texts):
    assert extend_tokenizer(old, texts[4:8], 40).tokenizer.identity == extend_tokenizer(old, texts[4:8], 40).tokenizer.identity


def test_what_cannot_be_extended_is_refused(old):
    with pytest.raises(TokenizerError, match="give at least 1"):
        extend_tokenizer(old, ["text"], 0)
    with pytest.raises(TokenizerError, match="give more text"):
        extend_tokenizer(old, ["\x01 \x02"], 5)
    words = Tokenizer(models.WordLevel({"a": 0, "<|end|>": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<|end|>"])
    with pytest.raises(TokenizerError, match="Only a byte-level BPE"):
        extend_tokenizer(TextTokenizer(words), ["a a"], 1)
