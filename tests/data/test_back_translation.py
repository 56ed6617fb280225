"""Back-translation: real targets, synthetic sources, and two toy languages that two models learn in seconds."""

import random
from importlib import import_module

import pytest
import torch

from shared.data.objectives import encoder_decoder_objective
from shared.data.spans import pair_batch
from shared.data.tokenizer import TextTokenizer
from shared.loop import train
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel

back_translation = import_module("chapters.03_data_pipeline.back_translation")
TAG, Pair, back_translate = back_translation.TAG, back_translation.Pair, back_translation.back_translate
BackTranslated, GreedyTranslator, encoded = back_translation.BackTranslated, back_translation.GreedyTranslator, back_translation.encoded
vocabularies = import_module("chapters.03_data_pipeline.vocabularies")
in_digits, in_words = vocabularies.in_digits, vocabularies.in_words

VOCABULARY = vocabularies.number_vocabulary(TAG)
SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
VALUES = {word: value for value, word in enumerate(SMALL.split())} | {word: 10 * value for value, word in enumerate(TENS.split(), start=2)}


def value_of(words: str) -> int:
    """A number from its words, by adding and multiplying from left to right."""
    total = 0
    for word in words.split():
        if word == "thousand":
            total *= 1000
        elif word == "hundred":
            total += total % 1000 * 99
        else:
            total += VALUES[word]
    return total


def test_every_number_has_words_that_say_it():
    assert all(value_of(in_words(number)) == number for number in range(10_000))
    assert in_words(4072) == "four thousand seventy two" and in_digits(4072) == "4 0 7 2"
    assert in_words(0) == "zero" and in_words(700) == "seven hundred"
    for number in (-1, 10_000):
        with pytest.raises(ValueError, match=f"{number} has no words"):
            in_words(number)


def test_the_vocabulary_gives_texts_back():
    for text in ("4 0 7 2", "four thousand seventy two", f"{TAG} 7", ""):
        assert VOCABULARY.decode(VOCABULARY.encode(text).tolist()) == text
    with pytest.raises(ValueError, match="no word 'million'"):
        VOCABULARY.encode("one million")


def test_a_tokenizer_is_a_vocabulary_too():
    tokenizer = TextTokenizer.train(["def f(x): return x"], vocab_size=300, sentinels=0)
    vocabulary = vocabularies.TextVocabulary(tokenizer)
    ids = vocabulary.encode("naïve 漢字")
    assert ids[-1] == vocabulary.end_id and vocabulary.decode([*ids.tolist(), 40, 41]) == "naïve 漢字"
    config = ModelConfig(architecture="encoder-decoder", vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=1)
    written = GreedyTranslator(TransformerModel(config), vocabulary, longest=3)(["one", "two"])
    assert len(written) == 2 and all(isinstance(text, str) for text in written)


def test_each_target_gets_a_tagged_source_and_stays_as_it_is():
    made = back_translate(["b a", "d c", "f e"], lambda texts: [text[::-1] for text in texts], batch_size=2)
    assert made == BackTranslated([Pair(f"{TAG} {text[::-1]}", text, True) for text in ("b a", "d c", "f e")], [])
    assert back_translate(["b a"], lambda texts: ["x"], tag="").pairs == [Pair("x", "b a", True)]


def test_sentences_without_a_back_translation_are_reported():
    made = back_translate(["one", "two", "three"], lambda texts: ["", "two ", "3"])
    assert made.pairs == [Pair(f"{TAG} 3", "three", True)]
    assert made.dropped == [("one", "the translation is empty"), ("two", "the translation is the text itself")]
    assert back_translate([], lambda texts: []) == BackTranslated([], [])


def test_a_translator_that_loses_texts_is_refused():
    with pytest.raises(ValueError, match="returned 1 texts for 2"):
        back_translate(["one", "two"], lambda texts: texts[:1])


def small_model() -> TransformerModel:
    config = ModelConfig(
        architecture="encoder-decoder", vocab_size=len(VOCABULARY), hidden_size=48, num_hidden_layers=1, position="relative",
        relative_attention_num_buckets=16, relative_attention_max_distance=16, max_position_embeddings=32, initializer_range=0.12,
    )  # fmt: skip
    return TransformerModel(config)


def learned(pairs: list[Pair], steps: int) -> GreedyTranslator:
    model, drawn, texts = small_model(), random.Random(0), encoded(pairs, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    batches = ([pair_batch(drawn.choices(texts, k=48), VOCABULARY.start_id)] for _ in range(steps))
    for _ in train(model, optimizer, batches, encoder_decoder_objective, steps=steps):
        pass
    return GreedyTranslator(model, VOCABULARY)


@pytest.fixture(scope="module")
def backward() -> GreedyTranslator:
    """From words into digits, learned from the numbers below 100."""
    return learned([Pair(in_words(number), in_digits(number)) for number in range(100)], steps=250)


def test_a_small_model_learns_to_translate(backward):
    numbers = list(range(0, 100, 3))
    right = sum(text == in_digits(number) for text, number in zip(backward(list(map(in_words, numbers))), numbers, strict=True))
    assert right >= 0.9 * len(numbers)


def test_a_translation_does_not_depend_on_its_neighbours(backward):
    texts = [in_words(number) for number in (7, 42, 80, 13)]
    assert backward(texts) == [backward([text])[0] for text in texts]
    assert backward([]) == []


def test_a_learned_translator_translates_back(backward):
    made = back_translate([in_words(number) for number in range(100)], backward)
    assert not made.dropped
    assert sum(pair.source == f"{TAG} {in_digits(number)}" for number, pair in enumerate(made.pairs)) >= 90
    assert all(pair.synthetic and pair.target == in_words(number) for number, pair in enumerate(made.pairs))


def test_texts_that_are_never_ended_are_cut_off(backward):
    endless = GreedyTranslator(small_model(), VOCABULARY, longest=5)
    assert all(len(text.split()) <= 5 for text in endless(["seven", "forty two"]))
