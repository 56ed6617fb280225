"""Tokenizers of others: which give text back, what they add, how their bytes are counted, and what no training may wait for."""

import time
import unicodedata

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from trainer_runs import SOURCE

from shared.course.errors import CourseError
from shared.data.completion import require_prompt
from shared.data.tokenizer import LONGEST_WORD, TextTokenizer, TokenizerError, without_long_words

TEXTS = ["def f(x):\n    return  x + 1\n\nclass Foo:\n    pass\n", "  Indented, and naïve.\n\tTab\n", "日本語 and e\u0301 🙂"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE = "▁"


def byte_level(add_prefix_space: bool = False, **parts) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    end = AddedToken("</s>", special=True, normalized=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def llama(*decoder) -> Tokenizer:
    """Spaces as a letter of their own, one before the text, and bytes for what the vocabulary lacks."""
    vocabulary = {f"<0x{number:02X}>": number for number in range(256)} | {SPACE: 256, "x": 257, SPACE + "x": 258, "<unk>": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(SPACE, "x")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *decoder]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    return tokenizer


LOSSLESS = {
    "GPT-2": (byte_level, False),
    "RoBERTa, a space before the text": (lambda: byte_level(add_prefix_space=True), True),
    "Qwen, composed characters": (lambda: byte_level(normalizer=normalizers.NFC()), False),
    "Llama": (lambda: llama(decoders.Strip(" ", 1, 0)), True),
    "Llama, its space left in place": (llama, True),
}
LOSSY = {
    "lower case": (normalizers.Lowercase(), "def F"),
    "no accents": (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), None),
    "no spaces at the ends": (normalizers.Strip(), "1\\n"),
    "BERT": (normalizers.BertNormalizer(), "def F"),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_tokenizers_that_give_text_back_are_taken_and_their_bytes_counted(name):
    make, adds_space = LOSSLESS[name]
    tokenizer = TextTokenizer(make())
    tokenizer.require_lossless()
    tokenizer.require_lossless(TEXTS)
    assert tokenizer.adds_space == adds_space
    for text in TEXTS[:2]:  # what bits per byte divides by: all but the first token of a document
        ids = tokenizer.encode(text)
        assert tokenizer.byte_lengths[ids].sum() - len(text.encode()) in (0, 1)
        rest = tokenizer.byte_lengths[ids[1:]].sum()
        assert len(text.encode()) - 8 <= rest <= len(text.encode())


@pytest.mark.parametrize("name", LOSSY)
def test_tokenizers_that_lose_text_are_refused_with_what_differs(name):
    normalizer, shown = LOSSY[name]
    tokenizer = TextTokenizer(byte_level(normalizer=normalizer))
    with pytest.raises(TokenizerError, match=r"does not give text back \('.* comes back as '.*prepare\.tokenizer") as refused:
        tokenizer.require_lossless(TEXTS)
    if shown is None:  # which text of plain letters does not show
        assert "naïve" in str(refused.value)
        tokenizer.require_lossless()
    else:
        with pytest.raises(TokenizerError):
            tokenizer.require_lossless()


def test_bytes_that_are_counted_otherwise_are_refused():
    tokenizer = TextTokenizer(byte_level())
    tokenizer.byte_lengths[tokenizer.encode("x")] = 3
    with pytest.raises(TokenizerError, match="stand for .* bytes, and it has"):
        tokenizer.require_lossless()


def test_a_few_characters_that_the_vocabulary_lacks_are_allowed():
    tokenizer = TextTokenizer(byte_level(normalizer=normalizers.Replace("é", "e")))
    tokenizer.require_lossless([*["plain text"] * 19, "café"])
    with pytest.raises(TokenizerError, match="caf"):
        tokenizer.require_lossless([*["plain text"] * 5, "café"])
    assert unicodedata.is_normalized("NFC", "café")


def test_a_hole_in_the_ids_costs_no_memory_and_gaps_that_released_models_have_are_taken():
    tokenizer = byte_level()
    rest = tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"extra {number}" for number in range(3)])
    assert TextTokenizer(tokenizer).vocab_size == rest + 3
    far = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 10**9}, unk_token="a"))
    far.add_special_tokens(["</s>"])
    with pytest.raises(TokenizerError, match="3 tokens and ids up to 1,000,000,000: a model keeps a row for each id"):
        TextTokenizer(far)


@pytest.mark.parametrize("text", ["x" * 300_000, "01" * 150_000, " " * 300_000, "-_" * 150_000, "\n \t" * 100_000])
def test_a_word_without_an_end_does_not_hold_up_the_training_of_a_tokenizer(text):
    assert "".join(without_long_words(text)) == text
    began = time.process_time()
    tokenizer = TextTokenizer.train([text], 300, 4)
    assert time.process_time() - began < 20  # 200 seconds and more, where words are not cut
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_are_cut_only_where_one_is_too_long():
    for file in sorted(SOURCE.rglob("*.py"))[:5]:
        assert without_long_words(file.read_text()) == [file.read_text()]
    for text in ("", "a", "a " * 5000, "a" * LONGEST_WORD, "b " * 700 + "a" * LONGEST_WORD, " " * LONGEST_WORD):
        assert without_long_words(text) == [text]
    assert [len(piece) for piece in without_long_words("a" * (LONGEST_WORD + 1))] == [LONGEST_WORD, 1]


def test_prompts_that_cannot_be_continued_are_refused_before_a_model_is_trained():
    tokenizer = TextTokenizer(byte_level(normalizer=normalizers.Strip()))
    require_prompt(tokenizer, "def ")
    for prompt, why in (("   ", "has no token"), ("\ud800", "half a character")):
        with pytest.raises(CourseError, match=why):
            require_prompt(tokenizer, prompt)


def test_every_epoch_has_as_many_rows():
    """So that rows of a billion epochs need not be planned to be counted."""
    from shared.data.packing import plan_rows

    draw = np.random.default_rng(0)
    for strategy in ("best_fit", "sequential"):
        for _ in range(20):
            lengths = draw.integers(0, 90, draw.integers(1, 60))
            rows = {plan_rows(draw.permutation(lengths), 32, strategy).rows for _ in range(8)}
            assert len(rows) == 1
