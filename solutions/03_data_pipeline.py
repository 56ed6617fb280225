"""Solutions of chapter 03. Each body with the reason why it is written this way."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from shared.data.fim import FimTokens
from shared.totals import Batch


def merge_pair(ids: list[int], pair: tuple[int, int], new_id: int) -> list[int]:
    """Reading and writing go their own ways: a pair moves the reader by two and writes one, so nothing is read twice."""
    merged, place = [], 0
    while place < len(ids):
        if place + 1 < len(ids) and (ids[place], ids[place + 1]) == pair:
            merged.append(new_id)
            place += 2
        else:
            merged.append(ids[place])
            place += 1
    return merged


def pack_documents(documents: Sequence[Tensor], seq: int) -> Batch:
    """The row starts out as padding, and each document is written over it: what no document reaches stays as it should be."""
    row = {name: torch.full((seq,), empty) for name, empty in (("input_ids", 0), ("targets", -100), ("documents", -1), ("positions", 0))}
    start = 0
    for number, ids in enumerate(documents):
        stop = start + len(ids) - 1
        if len(ids) < 2:
            raise ValueError(f"Document {number} has {len(ids)} tokens: give at least 2, an input and its target.")
        if stop > seq:
            raise ValueError(f"The documents need {stop} positions or more, and the row has {seq}: plan_rows says what fits.")
        row["input_ids"][start:stop] = ids[:-1]
        row["targets"][start:stop] = ids[1:]
        row["documents"][start:stop] = number
        row["positions"][start:stop] = torch.arange(stop - start)
        start = stop
    return row


def fill_in_middle(
    text: str, first: int, second: int, mode: Literal["psm", "spm"], encode: Callable[[str], list[int]], tokens: FimTokens
) -> list[int]:
    """Three encodings, not one that is cut afterwards: whoever fills a gap later encodes what stands on its two sides."""
    if not 0 <= first <= second <= len(text):
        raise ValueError(f"The cuts are {first} and {second} in a text of {len(text)} characters: give 0 <= first <= second <= length.")
    prefix, middle, suffix = encode(text[:first]), encode(text[first:second]), encode(text[second:])
    if mode == "psm":
        return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle, *middle, tokens.end]
    if mode == "spm":
        return [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix, *middle, tokens.end]
    raise ValueError(f"mode is {mode!r}: choose 'psm' or 'spm'.")


def mask_tokens(
    input_ids: Tensor, special: Tensor, selection: Tensor, fate: Tensor, replacements: Tensor, mask_id: int, rate: float = 0.15
) -> tuple[Tensor, Tensor]:
    """Two questions with draws of their own: whether a token is chosen, and what becomes of it. The target asks the first one
    only, so the tenth that stays as it is counts in the loss too."""
    chosen = (selection < rate) & ~special
    inputs = torch.where(chosen & (fate < 0.8), mask_id, input_ids)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), replacements, inputs)
    return inputs, torch.where(chosen, input_ids, -100)


def corrupt_spans(input_ids: Tensor, noise: Tensor, sentinels: Sequence[int], end_id: int) -> tuple[Tensor, Tensor]:
    """A span begins where a noise token follows one that is none. There the sentinel goes into both results; every token then
    goes into one of them."""
    inputs, targets, spans, before = [], [], 0, False
    for token, cut in zip(input_ids.tolist(), noise.tolist(), strict=True):
        if cut and not before:
            if spans == len(sentinels):
                raise ValueError(f"There are more spans than the {len(sentinels)} sentinels: give more of them, or longer spans.")
            inputs.append(sentinels[spans])
            targets.append(sentinels[spans])
            spans += 1
        (targets if cut else inputs).append(token)
        before = cut
    return torch.tensor([*inputs, end_id]), torch.tensor([*targets, end_id])
