"""What the stages of build 03 share: texts of the embedded corpus, the library's tokenizers as oracle, and budgets of processor time.

Ids, bytes and counts are compared exactly.
"""

import json
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


TEXT = "the text of build.py: stage {}"
LIBRARY = "Hugging Face's tokenizers"
WITHIN = "within the budget"

Results = dict[str, Any]


@cache
def real_text(name: str = "mpmath/functions/zeta.py", size: int | None = None) -> str:
    """The first characters of a file of a package whose version is pinned."""
    package, _, rest = name.partition("/")
    return (Path(find_spec(package).origin).parent / rest).read_text(encoding="utf-8")[:size]


# The library


def byte_characters() -> dict[str, int]:
    """Byte by the character that stands for it in a file."""
    printable = [value for value in range(256) if chr(value).isprintable() and not chr(value).isspace()]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + place): value for place, value in enumerate(others)}


CHARACTERS = byte_characters()


def in_bytes(written: str) -> bytes:
    return bytes(CHARACTERS[character] for character in written)


def library(texts: Iterable[str], size: int, special: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer that the library trained, with special tokens behind the others."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return made


def library_merges(made: Tokenizer) -> list[str]:
    return [f"{in_bytes(left)!r} {in_bytes(right)!r}" for left, right in json.loads(made.to_str())["model"]["merges"]]


def library_vocabulary(made: Tokenizer, special: tuple[str, ...] = ()) -> list[str]:
    by_id = {number: token for token, number in made.get_vocab(with_added_tokens=True).items()}
    return [repr(by_id[number].encode() if by_id[number] in special else in_bytes(by_id[number])) for number in range(len(by_id))]


def written_merges(adapters: Any, tokenizer: object) -> list[str]:
    return [f"{bytes(left)!r} {bytes(right)!r}" for left, right in adapters.merges(tokenizer)]


def numbers(ids: Iterable[int]) -> list[int]:
    """Ids as the check compares them, whatever kind of integers they are."""
    return [int(number) for number in ids]


# Refusals and budgets


def refusal(call: Callable[[], Any], *words: str) -> str:
    """What came of a call that must be refused with a ValueError whose message has these words, or one of those with | between them."""
    try:
        call()
    except ValueError as error:
        missing = [word for word in words if not any(each in str(error) for each in word.split("|"))]
        return REFUSED if not missing else f"ValueError, which does not say {missing[0].replace('|', ' or ')}: {error}"
    return "accepted"


REFUSED = "refused with a ValueError that says what"


def steps_per_second() -> float:
    """How fast this processor's Python is now: steps of a loop that counts in a dictionary.

    The thread's clock: while a limit of processor time is set, as in each check, Linux moves the clock of the process in ticks of
    4 ms and more, longer than this loop takes, and a loop of no time at all would divide by zero.
    """
    best = 1e9
    for _ in range(2):
        began, found = time.thread_time(), {}
        for place in range(20_000):
            key = place % 1009, place % 7
            found[key] = found.get(key, 0) + 1
        best = min(best, time.thread_time() - began)
    return 20_000 / best


def within(prepare: Callable[[], Any], work: Callable[[Any], Any], steps: int) -> str:
    """Whether work(prepare()) costs at most the processor's time of so many steps of a plain loop, at one of four tries."""
    for _ in range(4):
        made = prepare()
        limit = steps / steps_per_second()
        began = time.thread_time()
        work(made)
        spent = time.thread_time() - began
        if spent <= limit:
            return WITHIN
        if spent > 4 * limit:
            break
    return f"more processor time than {steps:,} steps of a plain loop take"


# Stages
