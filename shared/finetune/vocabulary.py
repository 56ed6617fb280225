"""Chapter 10. Vocabulary extension: new merges for a tokenizer, and a model with rows for them that begin at the mean of the old ones.

A byte-level tokenizer cuts text that it was not trained on into many short tokens. Merges that are appended to its own act on what the old
ones leave: every old token keeps its id and its row (Cui et al. 2023, "Chinese LLaMA", do the same with a second vocabulary).

A token that was added has no trained row. With a random row it would get any probability from the head, often a large one; the mean of all
rows (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models") gives it about an average one, so that what the model
says of the old tokens hardly moves. The same holds for a head of its own, and for its bias.

Nothing is assembled: the result is on the meta device, and each process reads the rows that it holds (`shared.model.init`).

Training tells equal rows apart, because other tokens stand around them. Where embedding and head are frozen, under an adapter, nothing ever
would: a chat's begin and end tokens would have one logit, and no answer would end. There each new row gets a deviation of its own.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from shared.course.errors import SettingError
from shared.data.tokenizer import TextTokenizer, TokenizerError
from shared.model.builders import Builders
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import logical_parameters
from shared.model.transformer import PLAIN, TIED, TIED_TO, TransformerModel

LEAST = 2  # how often a pair must occur to be merged: what occurs once is a name
ROWS = 4096  # of a matrix that are read at a time for its mean
GROWING = (TIED_TO, TIED, "head.linear.bias")
Stored = Callable[[Sequence[int], Sequence[int]], Tensor]  # (offsets, sizes) of a slice -> its numbers


class MeanRows:
    """Stored rows, and after them as many as are asked for that are the mean of all stored ones.

    Args:
        stored: reads a slice of the old tensor.
        shape: of the old tensor.
        apart: whether each new row differs from the mean, by normal numbers with the stored rows' deviation in each column. They depend on
            the row's number alone.
    """

    def __init__(self, stored: Stored, shape: Sequence[int], apart: bool = False):
        self.stored, (self.rows, *self.width), self.apart = stored, shape, apart

    def __call__(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        (first, *others), (count, *widths) = offsets, sizes
        old = min(max(self.rows - first, 0), count)
        parts = [self.stored((first, *others), (old, *widths))] if old else []
        if old < count:
            mean, deviation = self.statistics(others, widths)
            new = [mean + deviation * self.draw(row, others, widths) for row in range(first + old, first + count)] if self.apart else None
            parts.append(torch.stack(new) if new else mean.expand(count - old, *widths))
        return torch.cat(parts)

    def statistics(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Mean and deviation of all stored rows, in the columns of a slice: float32, summed in float64."""
        total, squares = torch.zeros(2, *sizes, dtype=torch.float64)
        for start in range(0, self.rows, ROWS):
            part = self.stored((start, *offsets), (min(ROWS, self.rows - start), *sizes)).double()
            total += part.sum(dim=0)
            squares += part.square().sum(dim=0)
        mean = total / self.rows
        return mean.float(), (squares / self.rows - mean.square()).clamp(min=0).sqrt().float()

    def draw(self, row: int, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A slice of a new row's normal numbers."""
        return part_of(torch.randn(self.width, generator=torch.Generator().manual_seed(row)), offsets, sizes)


def resized(
    model: TransformerModel, config: ModelConfig, builders: Builders = PLAIN, apart: bool = False
) -> TransformerModel:
    """A model of another configuration with the weights of `model`, on the meta device: each parameter carries `stored`.

    Args:
        model: whole, or as `open_pretrained` returns it, on the meta device.
        config: differs from `model.config` in a larger `vocab_size`, or in what no weight depends on.
        builders: what its pieces are made of.
        apart: whether new rows differ from one another (`MeanRows`), for a model whose embedding and head stay frozen.
    """
    with torch.device("meta"):
        made = TransformerModel(config, builders)
    made.token_ids = dict(model.token_ids)
    old, new = logical_parameters(model), logical_parameters(made)
    if odd := sorted(old.keys() ^ new.keys()):
        raise SettingError(f"The weights do not fit this model: {odd[0]} is only in one of the two.")
    for name, parameter in new.items():
        source = old[name]
        stored = getattr(source, "stored", None) or partial(part_of, source.detach())
        grows = name in GROWING and parameter.shape[1:] == source.shape[1:] and len(parameter) > len(source)
        if parameter.shape != source.shape and not grows:
            raise SettingError(
                f"The weights do not fit this model: {name} is {list(parameter.shape)} here and {list(source.shape)} there. "
                "Only the vocabulary can grow."
            )
        parameter.stored = MeanRows(stored, source.shape, apart) if grows else stored
    return made


def part_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


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
    return Extension(TextTokenizer(Tokenizer.from_str(json.dumps(raw)), tokenizer.end, tokenizer.names), parts)


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
