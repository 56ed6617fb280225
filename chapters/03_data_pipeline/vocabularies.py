"""Vocabularies for back-translation: a tokenizer, and two toy languages that small models translate in seconds, digits and number words.

    4 0 7 2   <->   four thousand seventy two

Every sentence of one language has exactly one translation, so each answer can be judged, and both need place value: the same
digit is another word at another place, and a zero is silent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shared.data.tokenizer import TextTokenizer

ONES = "zero one two three four five six seven eight nine ten eleven twelve".split()
ONES += "thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
LARGEST = 9999


def in_digits(number: int) -> str:
    """4072 as "4 0 7 2"."""
    return " ".join(str(number))


def in_words(number: int) -> str:
    """4072 as "four thousand seventy two".

    Raises:
        ValueError: a number below 0 or above 9999.
    """
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{number} has no words here: give a number from 0 to {LARGEST}.")
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        return joined(TENS[number // 10 - 2], number % 10)
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    return joined(f"{ONES[number // size]} {name}", number % size)


def joined(front: str, rest: int) -> str:
    return f"{front} {in_words(rest)}" if rest else front


@dataclass(frozen=True)
class WordVocabulary:
    """Word-level ids for toy languages: 0 is padding and what a decoder reads first, 1 ends a text, then the words."""

    words: tuple[str, ...]

    start_id = 0
    end_id = 1

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words, start=2)}

    def __len__(self) -> int:
        return len(self.words) + 2

    def encode(self, text: str) -> Tensor:
        """[words + 1] int64, the end token last.

        Raises:
            ValueError: a word that the vocabulary lacks.
        """
        if unknown := [word for word in text.split() if word not in self.ids]:
            raise ValueError(f"The vocabulary has no word {unknown[0]!r} (in {text!r}).")
        return torch.tensor([*(self.ids[word] for word in text.split()), self.end_id])

    def decode(self, ids: Sequence[int]) -> str:
        """The words of ids, up to the first end token; padding is left out."""
        ids = list(ids)
        ids = ids[: ids.index(self.end_id)] if self.end_id in ids else ids
        return " ".join(self.words[place - 2] for place in ids if place > self.end_id)


def number_vocabulary(*more: str) -> WordVocabulary:
    """Digits, the words of numbers, and `more` words such as a tag."""
    return WordVocabulary((*"0123456789", *ONES, *TENS, "hundred", "thousand", *more))


class TextVocabulary:
    """A tokenizer of `shared.data.tokenizer` as a vocabulary of pairs; its end token is also what a decoder reads first."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer, self.start_id, self.end_id = tokenizer, tokenizer.end_id, tokenizer.end_id

    def encode(self, text: str) -> Tensor:
        return torch.tensor([*self.tokenizer.encode(text), self.end_id])

    def decode(self, ids: Sequence[int]) -> str:
        ids = list(ids)
        return self.tokenizer.decode(ids[: ids.index(self.end_id)] if self.end_id in ids else ids)
