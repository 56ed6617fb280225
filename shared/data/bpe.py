"""Chapter 03. Byte-level byte-pair encoding (BPE), small enough to read: how a tokenizer is trained on text, and how it is used.

Text becomes bytes, so nothing is unknown. Training joins the most frequent pair of neighbours to a new token, again and again
(Sennrich et al. 2016, section 3.2; on bytes, Radford et al. 2019, section 2.2); encoding replays those merges in their order.
Pairs never cross a word's border, and words are those of GPT-2: a word with the space before it.

Of two equally frequent pairs the one with the smaller ids is joined, left id first. Byte ids follow GPT-2's order: printable
bytes, then the others. With both rules the merges are those of Hugging Face's `tokenizers`.

Left out on purpose: speed, special tokens and files. `shared.data.tokenizer` has them, by the library.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers.pre_tokenizers import ByteLevel

from shared.course.binding import exercise

Pair = tuple[int, int]

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are a visible character of Latin-1
BYTES = [bytes([value]) for value in PRINTABLE + sorted(set(range(256)) - set(PRINTABLE))]  # by id
BYTE_IDS = {character: place for place, character in enumerate(sorted(ByteLevel.alphabet()))}  # GPT-2 writes a byte as a character


@exercise("03.merge_pair")
def merge_pair(ids: list[int], pair: tuple[int, int], new_id: int) -> list[int]:
    """Join each occurrence of a pair of neighbours to one new token.

    Occurrences are taken from left to right and do not overlap: a token that has been joined is used up.

    Args:
        ids: token ids, possibly none. Left unchanged.
        pair: the left id and the right id; they may be equal.
        new_id: what stands in their place. It may be one of the pair, and is not joined again.

    Returns:
        A new list.

    >>> merge_pair([5, 6, 5, 5, 6], (5, 6), 9)
    [9, 5, 9]
    >>> merge_pair([7, 7, 7], (7, 7), 9)                # the first two; the third has no partner left
    [9, 7]
    """


def words_of(text: str) -> list[tuple[int, ...]]:
    """The words of a text as byte ids 0 .. 255, by GPT-2's rule: letters, digits or signs, with a space before them."""
    return [tuple(BYTE_IDS[character] for character in word) for word, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]


@dataclass(frozen=True)
class BytePairEncoding:
    """A tokenizer: which pairs are joined, in which order, and to what.

    merges: (left, right) -> new id, in the order in which they were learned.
    tokens: the bytes of each id; the first 256 are single bytes.
    """

    merges: dict[Pair, int]
    tokens: list[bytes]

    @cached_property
    def ranks(self) -> dict[Pair, int]:
        """When each pair was learned; encoding joins the earliest one first."""
        return {pair: rank for rank, pair in enumerate(self.merges)}

    @cached_property
    def known(self) -> dict[tuple[int, ...], list[int]]:
        """Words that were encoded before: a text has few different ones."""
        return {}

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. `decode` gives the text back, whatever it is."""
        ids = []
        for word in words_of(text):
            if word not in self.known:
                self.known[word] = self.encode_word(word)
            ids += self.known[word]
        return ids

    def encode_word(self, word: Sequence[int]) -> list[int]:
        """Join the earliest learned pair that is there, wherever it stands, until none is."""
        ids = list(word)
        while pairs := self.ranks.keys() & set(zip(ids, ids[1:], strict=False)):
            earliest = min(pairs, key=self.ranks.__getitem__)
            ids = merge_pair(ids, earliest, self.merges[earliest])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are no UTF-8, as where a character was cut in two, become U+FFFD."""
        return b"".join(self.tokens[place] for place in ids).decode("utf-8", errors="replace")


class WordCounts:
    """The words of a text with their counts, and of each pair of neighbours how often it occurs and in which words."""

    def __init__(self, texts: Iterable[str]):
        counted = Counter(word for text in texts for word in words_of(text))
        self.words, self.times = list(map(list, counted)), list(counted.values())
        self.pairs: Counter[Pair] = Counter()
        self.places: defaultdict[Pair, set[int]] = defaultdict(set)
        for place in range(len(self.words)):
            self.count(place, +1)

    def count(self, place: int, sign: int) -> None:
        """Add a word's pairs to the counts, or take them away again."""
        word, times = self.words[place], self.times[place]
        for pair in zip(word, word[1:], strict=False):
            self.pairs[pair] += sign * times
            if sign > 0:
                self.places[pair].add(place)

    def most_frequent(self) -> Pair | None:
        """The pair to join next, the smaller of equals; None where no word has two tokens left."""
        best = min(self.pairs, key=lambda pair: (-self.pairs[pair], pair), default=None)
        return best if best and self.pairs[best] > 0 else None

    def join(self, pair: Pair, new_id: int) -> None:
        """Join a pair in all words. Only the words that hold it are counted again."""
        for place in self.places.pop(pair):
            self.count(place, -1)
            self.words[place] = merge_pair(self.words[place], pair, new_id)
            self.count(place, +1)
        del self.pairs[pair]


def train_bpe(texts: Iterable[str], vocab_size: int) -> BytePairEncoding:
    """Learn merges from texts until there are `vocab_size` tokens, or nothing is left to join."""
    if vocab_size < len(BYTES):
        raise ValueError(f"vocab_size is {vocab_size}: give at least {len(BYTES)}, one token for each byte.")
    counts, merges, tokens = WordCounts(texts), {}, list(BYTES)
    ids = {token: place for place, token in enumerate(tokens)}
    while len(tokens) < vocab_size and (pair := counts.most_frequent()):
        joined = tokens[pair[0]] + tokens[pair[1]]
        if joined not in ids:  # two pairs may spell the same bytes: a + bc, ab + c
            ids[joined] = len(tokens)
            tokens.append(joined)
        merges[pair] = ids[joined]
        counts.join(pair, ids[joined])
    return BytePairEncoding(merges, tokens)
