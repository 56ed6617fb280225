"""Stage 4 of build 03: budgets of processor time, in steps of a plain loop, so that they hold on any machine. A form that does the work
once takes a third of its budget or less, one that does it again and again takes several times as much."""

import random
from functools import cache
from typing import Any

from shared.course.checking import Case

from .pieces import TEXT, WITHIN, Results, within


@cache
def many_words(count: int, seed: int) -> str:
    """Different words of syllables."""
    generator = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    return " ".join("".join(generator.choices(syllables, k=generator.randint(2, 4))) for _ in range(count))


def train_case(title: str, texts: list[str], size: int, steps: int) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        found = {}
        spent = within(lambda: None, lambda _: found.update(merges=adapters.merges(adapters.train(texts, size))), steps)
        return {"training": spent, "merges": len(found["merges"])}

    given = {"characters": sum(map(len, texts)), "different words": len(set(" ".join(texts).split())), "merges": size - 256}
    return Case("budget", title, lambda: given, lambda **_: {"training": WITHIN, "merges": size - 256}, TEXT.format(4), observe)


def encode_case(title: str, texts: list[str], size: int, text: str, steps: int) -> Case:
    def observe(adapters: Any, **_: Any) -> Results:
        found = {}
        spent = within(lambda: adapters.train(texts, size), lambda tokenizer: found.update(ids=adapters.encode(tokenizer, text)), steps)
        return {"encoding": spent, "fewer tokens than characters": 0 < len(found["ids"]) < len(text)}

    given = {"characters of the text": len(text), "different words": len(set(text.split())), "merges": size - 256}
    expected = {"encoding": WITHIN, "fewer tokens than characters": True}
    return Case("budget", title, lambda: given, lambda **_: expected, TEXT.format(4), observe)


FEW = "the theory of the other thing: return the end of the list\n"
LONG = "antidisestablishmentarianism pseudopseudohypoparathyroidism floccinaucinihilipilification\n"

FAST = (
    train_case("a few words, each of them four thousand times", [FEW * 4000], 276, 900_000),
    train_case("many words, and 300 merges", [many_words(1200, 1)], 556, 1_400_000),
    encode_case("a few long words, each of them three thousand times", [FEW], 290, LONG * 3000, 180_000),
    encode_case("many words, and many merges", [many_words(250, 2)], 800, many_words(800, 3), 170_000),
    encode_case("one very long word", [FEW], 290, "thetheorythingreturnlist" * 200, 500_000),
)
