"""Chapter 03. Fill in the middle (FIM): a part of a document is moved to its end, so that a causal model learns to fill gaps.

A document is cut at two characters into prefix, middle and suffix, and written in another order, with special tokens that say
which part begins. Nothing is lost or added, and the loss stays on every token. Two orders (Bavarian et al. 2022, section 3):

    psm   <PRE> prefix <SUF> suffix <MID> middle <END>
    spm   <PRE> <SUF> suffix <MID> prefix middle <END>          (their variant 2: the middle goes right on from the prefix)

The parts are encoded one by one: a reader who asks for a middle does not know on which side of the gap a token would begin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from shared.course.binding import exercise
from shared.course.bounds import UnitFloat, checked

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


class FimTokens(NamedTuple):
    """The ids of the special tokens. `end` is the one that ends every document, moved or not."""

    prefix: int
    suffix: int
    middle: int
    end: int


@exercise("03.fill_in_middle")
def fill_in_middle(
    text: str, first: int, second: int, mode: Literal["psm", "spm"], encode: Callable[[str], list[int]], tokens: FimTokens
) -> list[int]:
    """A document's ids with its middle moved to the end (Bavarian et al. 2022, section 3).

    The document is cut before character `first` and before character `second` into prefix, middle and suffix, any of which may
    be empty. Each of the three is encoded on its own; in spm too, prefix and middle are encoded apart.

    Both orders begin with tokens.prefix and end with tokens.end. In psm prefix, suffix and middle come in this order, each behind its own
    special token. In spm the suffix with its token comes before the two others, and prefix and middle follow tokens.middle together, with
    nothing between them, so that nothing stands directly behind tokens.prefix (the paper's variant 2).

    Args:
        text: a document, without its end token.
        first, second: 0 <= first <= second <= len(text), counted in characters.
        mode: "psm" or "spm".
        encode: text -> ids; it never makes special tokens. [] for the empty text.
        tokens: the special tokens' ids.

    Returns:
        One list of ids.

    Raises:
        ValueError: cuts that are out of order or outside of the text, or another mode.

    >>> letters = lambda part: [ord(letter) for letter in part]
    >>> fill_in_middle("abcd", 1, 3, "psm", letters, FimTokens(1, 2, 3, 0))          # a | bc | d
    [1, 97, 2, 100, 3, 98, 99, 0]
    >>> fill_in_middle("abcd", 1, 3, "spm", letters, FimTokens(1, 2, 3, 0))
    [1, 2, 100, 3, 97, 98, 99, 0]
    """


def undo_fim(ids: Sequence[int], tokens: FimTokens, decode: Decode) -> str:
    """The text that was moved, to the byte, from either order. Ids without a prefix token at the front were not moved.

    Raises:
        ValueError: the ids begin like a moved document and are none: a special token is missing or stands twice.
    """
    ids = list(ids)
    if ids[-1:] == [tokens.end]:
        ids = ids[:-1]
    if ids[:1] != [tokens.prefix]:
        return decode(ids)
    marks = [place for place, found in enumerate(ids) if found in tokens]
    if [ids[place] for place in marks] != [tokens.prefix, tokens.suffix, tokens.middle]:
        raise ValueError("These ids are no moved document: they need prefix, suffix and middle token, each once, in this order.")
    _, suffix, middle = marks
    before, after, moved = ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
    # In spm `before` is empty, and `moved` begins with the prefix. Decoded as one: a cut between tokens may halve a character.
    return decode(before + moved + after)


@dataclass(frozen=True)
@checked
class FimConfig:
    """How often a document's middle is moved, and where it is cut.

    Args:
        rate: the share of documents that are moved. Up to 0.9 costs no left-to-right quality (Bavarian et al. 2022, section 4).
        spm_share: of these, the share in spm order.
        split: cut between any two characters, at the beginnings of lines, or between tokens. A model that was trained on
            cuts between tokens fails where a user's cursor stands inside one (there, section 4.4).
    """

    rate: UnitFloat = 0.5
    spm_share: UnitFloat = 0.5
    split: Literal["character", "line", "token"] = "character"


@dataclass(frozen=True)
class FillInMiddle:
    """Moves the middle of some documents: `transform(ids, generator) -> ids`, the same for the same generator state.

    A moved document is 3 tokens longer, and a few more where a cut split a token.
    """

    config: FimConfig
    encode: Encode
    decode: Decode
    tokens: FimTokens

    def __call__(self, ids: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Args:
            ids: [n] integers, a document with its end token, or a piece of one, possibly without.
            generator: four draws are taken from it, whatever is done.

        Returns:
            [m] in the dtype of `ids`: the ids themselves, or those of the moved document.
        """
        moved, spm, *cuts = generator.random(4)
        if moved >= self.config.rate:
            return ids
        body = ids.tolist()
        body = body[:-1] if body[-1:] == [self.tokens.end] else body
        mode = "spm" if spm < self.config.spm_share else "psm"
        return np.array(self.moved(body, mode, sorted(cuts)), dtype=ids.dtype)

    def moved(self, body: list[int], mode: Literal["psm", "spm"], cuts: Sequence[float]) -> list[int]:
        """`body` in another order, cut at these two shares (0 to 1) of the places where the configuration cuts."""
        text = self.decode(body)
        encoded = self.encode(text)
        if special := set(encoded) & set(self.tokens):
            raise ValueError(f"The tokenizer turns text into the special tokens {sorted(special)}: encode text as text alone.")
        encode, places = self.encode, cut_places(text, self.config.split)
        if self.config.split == "token" or encoded != body:
            # A piece of a document may begin inside a character, and its text is then not its tokens': cut between tokens. The
            # text that stands for them has one character for each.
            text, encode = "".join(map(chr, body)), lambda part: list(map(ord, part))
            places = range(len(text) + 1)
        first, second = (places[int(share * len(places))] for share in cuts)
        return fill_in_middle(text, first, second, mode, encode, self.tokens)


def cut_places(text: str, split: Literal["character", "line", "token"]) -> Sequence[int]:
    """Where a text may be cut: before each line, or before each character, and at its end."""
    if split == "line":
        return [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    return range(len(text) + 1)
