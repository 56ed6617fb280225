"""Your part of chapter 03. Write each body in place of its `raise` line, in any order.

    course check 03          checks what you wrote
    course hint 03.merge_pair    the first of three hints

Nothing else in the course is edited: the core takes your functions from this file with `--impl mine`. They are plain functions, without
decorators.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from shared.data.fim import FimTokens
from shared.totals import Batch


# A merge of byte-pair encoding (10 min, difficulty 1 of 5)
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
    raise NotImplementedError("03.merge_pair: write this body")


# Packing documents into a row (20 min, difficulty 2 of 5)
def pack_documents(documents: Sequence[Tensor], seq: int) -> Batch:
    """One row from several documents, side by side in the order given, then padding.

    A document of n tokens gives n - 1 predictions: each token but the last is an input, each but the first a target. So the
    first token of a document is never the target of the document before it, and nothing is predicted from its last token.

    Args:
        documents: one or more of [n_i], any integer dtype, n_i >= 2; the last token of a whole document is its end token.
            Left unchanged.
        seq: positions in the row; the sum of all n_i - 1 is at most this.

    Returns:
        Four new tensors, [seq] int64, which share no memory with the documents:
        `input_ids`: the inputs; 0 on padding.
        `targets`: the token that follows in the same document; -100 on padding.
        `documents`: 0 for the first document, 1 for the second, ...; -1 on padding.
        `positions`: 0, 1, 2, ... restarting in each document; 0 on padding.

    Raises:
        ValueError: a document with fewer than 2 tokens, or documents that do not fit into the row.

    >>> row = pack_documents([torch.tensor([5, 6, 7, 2]), torch.tensor([8, 2])], seq=6)
    >>> row["input_ids"], row["targets"]
    (tensor([5, 6, 7, 8, 0, 0]), tensor([   6,    7,    2,    2, -100, -100]))
    >>> row["documents"], row["positions"]
    (tensor([ 0,  0,  0,  1, -1, -1]), tensor([0, 1, 2, 0, 0, 0]))
    """
    raise NotImplementedError("03.pack_documents: write this body")


# Fill in the middle, in both orders (15 min, difficulty 2 of 5)
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
    raise NotImplementedError("03.fill_in_middle: write this body")


# BERT's masking (15 min, difficulty 2 of 5)
def mask_tokens(
    input_ids: Tensor, special: Tensor, selection: Tensor, fate: Tensor, replacements: Tensor, mask_id: int, rate: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Hide a share of the tokens and ask for them (Devlin et al. 2019, section 3.1).

    A token that is not special is chosen where its selection is below `rate`. What becomes of a chosen one, its fate says:

        fate < 0.8           mask_id
        0.8 <= fate < 0.9    the token of `replacements` at its place
        0.9 <= fate          it stays as it is, and must be predicted all the same

    Args:
        input_ids: [batch, seq] int64. Left unchanged.
        special: [batch, seq] bool, True for tokens that are never chosen: padding, end tokens.
        selection, fate: [batch, seq] float, drawn uniformly from [0, 1).
        replacements: [batch, seq] int64, random token ids.
        mask_id: the mask token.
        rate: the share of the tokens that is chosen.

    Returns:
        Two new tensors, which share no memory with the arguments:
        inputs: [batch, seq] int64, what the model sees.
        targets: [batch, seq] int64, the original token where one was chosen, -100 elsewhere.

    >>> ids, special = torch.tensor([[11, 12, 13, 14, 0]]), torch.tensor([[False, False, False, False, True]])
    >>> selection, fate = torch.tensor([[0.1, 0.1, 0.1, 0.5, 0.1]]), torch.tensor([[0.3, 0.85, 0.95, 0.3, 0.3]])
    >>> mask_tokens(ids, special, selection, fate, torch.full((1, 5), 99), mask_id=3)
    (tensor([[ 3, 99, 13, 14,  0]]), tensor([[  11,   12,   13, -100, -100]]))
    """
    raise NotImplementedError("03.mask_tokens: write this body")


# T5's span corruption (25 min, difficulty 3 of 5)
def corrupt_spans(input_ids: Tensor, noise: Tensor, sentinels: Sequence[int], end_id: int) -> tuple[Tensor, Tensor]:
    """Replace each span by a sentinel, and collect the spans behind their sentinels (Raffel et al. 2019, figure 2).

    A span is a run of neighbouring noise tokens, as long as it goes. The first span gets sentinels[0], the second sentinels[1], ...

    Args:
        input_ids: [n] int64, without an end token.
        noise: [n] bool, True for the tokens that are cut out.
        sentinels: token ids that stand nowhere else. T5's count downwards from the last id of its vocabulary.
        end_id: ends both results.

    Returns:
        inputs: [...] int64: the text with one sentinel in place of each span, and the end token.
        targets: [...] int64: for each span its sentinel and its tokens, and the end token.

    Raises:
        ValueError: there are more spans than sentinels.

    >>> noise = torch.tensor([False, True, True, False, True])
    >>> corrupt_spans(torch.tensor([11, 12, 13, 14, 15]), noise, sentinels=[99, 98, 97], end_id=1)
    (tensor([11, 99, 14, 98,  1]), tensor([99, 12, 13, 98, 15,  1]))
    """
    raise NotImplementedError("03.corrupt_spans: write this body")
