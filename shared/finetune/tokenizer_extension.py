"""Chapter 10. Vocabulary extension of a tokenizer: merges trained on text of a new language or domain, appended to those it has.

A byte-level tokenizer cuts text that it was not trained on into many short tokens, often single bytes. Its merges are applied in order, so
merges that are appended act on what the old ones leave: every old token keeps its id and its row, and a new token is two known ones next to
each other (Cui et al. 2023, "Chinese LLaMA", do the same with a second vocabulary).

Left out on purpose: taking old merges away, and tokenizers that are no byte-level BPE.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import Tokenizer

from shared.data.tokenizer import TextTokenizer, TokenizerError

LEAST = 2  # how often a pair must occur: a merge of what occurs once is a name


class Extension(NamedTuple):
    """An extended tokenizer. parts: for each new id the two older ids that it joins, in the order of the new ids."""

    tokenizer: TextTokenizer
    parts: dict[int, tuple[int, int]]


def extend_tokenizer(tokenizer: TextTokenizer, texts: Iterable[str], new_tokens: int) -> Extension:
    """Train further merges on new text: byte-level BPE (Sennrich et al. 2016) that begins with the tokens of `tokenizer`.

    Args:
        tokenizer: byte-level BPE; left unchanged.
        texts: of the new language or domain, read once; their distinct words are held.
        new_tokens: how many to add. Small text may give fewer.
    """
    if new_tokens < 1:
        raise TokenizerError(f"new_tokens is {new_tokens}: give at least 1.")
    raw = json.loads(tokenizer.tokenizer.to_str())
    if raw["model"].get("type") != "BPE" or '"ByteLevel"' not in json.dumps(raw["pre_tokenizer"]):
        raise TokenizerError("Only a byte-level BPE tokenizer can be extended by merges: train a new one for the new text.")
    vocabulary: dict[str, int] = raw["model"]["vocab"]
    names = {number: token for token, number in vocabulary.items()}
    words = [(list(ids), count) for ids, count in count_words(tokenizer, texts).items() if len(ids) > 1]
    pairs, places = count_pairs(words)
    waiting = [(-count, pair) for pair, count in pairs.items()]  # of equally frequent pairs the one of lower ids comes first
    heapq.heapify(waiting)
    parts: dict[int, tuple[int, int]] = {}
    merges = raw["model"]["merges"]
    while len(parts) < new_tokens and waiting:
        count, pair = heapq.heappop(waiting)
        if pairs[pair] != -count:  # it has changed since; its new count waits too
            continue
        if -count < LEAST:
            break
        joined, made = names[pair[0]] + names[pair[1]], tokenizer.vocab_size + len(parts)
        known = vocabulary.get(joined)
        number = made if known is None else known  # a second way to a token that there is
        if known is None:
            vocabulary[joined], names[made], parts[made] = made, joined, pair
        merges.append([names[pair[0]], names[pair[1]]])
        touched: set[tuple[int, int]] = set()
        for place in list(places[pair]):
            touched |= merge_word(words[place], pair, number, pairs, places, place)
        for each in touched:
            heapq.heappush(waiting, (-pairs[each], each))
    if not parts:
        raise TokenizerError("No two tokens of the new text occur together twice: give more text.")
    return Extension(TextTokenizer(Tokenizer.from_str(json.dumps(raw)), tokenizer.end), parts)


def count_words(tokenizer: TextTokenizer, texts: Iterable[str]) -> Counter[tuple[int, ...]]:
    """Each distinct word as the tokenizer's ids, and how often it occurs. Merges never join what the pre-tokenizer separates."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in tokenizer.tokenizer.pre_tokenizer.pre_tokenize_str(text))
    counted: Counter[tuple[int, ...]] = Counter()
    for word, count in words.items():
        counted[tuple(token.id for token in tokenizer.tokenizer.model.tokenize(word))] += count
    return counted


def count_pairs(words: list[tuple[list[int], int]]) -> tuple[Counter, dict]:
    """How often each pair of neighbours occurs, and in which words."""
    pairs: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], set[int]] = defaultdict(set)
    for place, (ids, count) in enumerate(words):
        for pair in zip(ids, ids[1:], strict=False):
            pairs[pair] += count
            places[pair].add(place)
    return pairs, places


def merge_word(word: tuple[list[int], int], pair: tuple[int, int], number: int, pairs: Counter, places: dict, place: int) -> set:
    """Join each occurrence of a pair in a word, in place, and move its neighbours' counts. Returns the pairs whose counts changed."""
    ids, count = word
    before = list(zip(ids, ids[1:], strict=False))
    for old in before:
        pairs[old] -= count
        places[old].discard(place)
    joined, at = [], 0
    while at < len(ids):
        is_pair = tuple(ids[at : at + 2]) == pair
        joined.append(number if is_pair else ids[at])
        at += 2 if is_pair else 1
    ids[:] = joined
    after = list(zip(ids, ids[1:], strict=False))
    for new in after:
        pairs[new] += count
        places[new].add(place)
    return {*before, *after}
