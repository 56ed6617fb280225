"""Chapter 02. Variable-length attention of packed rows, document by document: no score between two documents is computed.

A mask hides pairs of positions after PyTorch's kernel has computed them, and it keeps the kernel from skipping what a causal pattern hides.
In a row of 2,048 positions that holds documents of 200, nine pairs in ten lie between documents. Here each document is attended to by
itself, in a call of the kernel for each of them.

Left out on purpose: documents of one length in one call; too few have the same. On a GPU the mask remains.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.devices import sent

FEWEST_POSITIONS = 512  # in a row; in shorter ones the calls cost as much as the pairs that they save (tests/benchmarks/README.md)
PAIRS_OF_A_CALL = 2500  # a call for one more document costs about as much as this many pairs of positions


class PackedDocuments(NamedTuple):
    """The documents of packed rows, of padding too, one row after the other.

    lengths: positions in each. rows: how many rows these are, at least 1; one row may stand for all of a batch.
    starts: [documents + 1] int32, where each begins and the last one ends, on the device of the batch. longest: the largest length.
    """

    lengths: list[int]
    rows: int
    starts: Tensor
    longest: int


class DocumentMask(NamedTuple):
    """A rule that holds within each document: causal, and at most `window` positions back, the query itself included."""

    documents: PackedDocuments
    causal: bool
    window: int | None


def pack_of(ids: Tensor, device: torch.device) -> PackedDocuments | None:
    """The documents of rows. None if one of them is not in one piece.

    Args:
        ids: [rows, seq] integers on the CPU, equal where positions of a row belong together.
        device: of the attention.
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    places = begins.nonzero()
    if torch.unique(torch.stack([places[:, 0], ids[begins]]), dim=1).shape[1] < len(places):
        return None
    starts = torch.cat([places @ torch.tensor([ids.shape[1], 1]), torch.tensor([ids.numel()])])
    lengths = starts.diff().tolist()
    return PackedDocuments(lengths, len(ids), sent(starts.int(), device), max(lengths))


def attend_documents(queries: Tensor, keys: Tensor, values: Tensor, mask: DocumentMask, scale: float, dropout: float) -> Tensor:
    """Scaled dot-product attention within each document: [batch, H, seq, d].

    Args:
        queries: [batch, H, seq, d].
        keys, values: [batch, K, seq, d]; K divides H.
        mask: over these rows, or over one row that stands for all.
    """
    lengths = mask.documents.lengths * (len(queries) // mask.documents.rows)
    groups = queries.shape[1] // keys.shape[1]
    each = (tensor.transpose(1, 2).flatten(0, 1).split(lengths) for tensor in (queries, keys, values))  # [length, heads, d]
    mixed = [attend_one(*(part.transpose(0, 1)[None] for part in document), mask, scale, dropout, groups) for document in zip(*each)]
    return torch.cat(mixed, dim=2).squeeze(0).transpose(0, 1).unflatten(0, (len(queries), -1)).transpose(1, 2)


def attend_one(queries: Tensor, keys: Tensor, values: Tensor, mask: DocumentMask, scale: float, dropout: float, groups: int) -> Tensor:
    """The same of one document, [1, H, length, d]."""
    length, window = queries.shape[2], None
    if mask.window is not None and mask.window < length:
        positions = torch.arange(length, device=queries.device)
        back = positions[:, None] - positions
        window = (back >= 0) & (back < mask.window)
        keys, values = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (keys, values))
        groups = 1
    causal = mask.causal and window is None
    return F.scaled_dot_product_attention(queries, keys, values, window, dropout, is_causal=causal, scale=scale, enable_gqa=groups > 1)


def saves_work(lengths: Sequence[int], rows: int, seq: int) -> bool:
    """Whether attention document by document is cheaper than all pairs of the rows with a mask."""
    return seq >= FEWEST_POSITIONS and sum(length**2 + PAIRS_OF_A_CALL for length in lengths) < rows * seq**2


def takes_documents(device: torch.device) -> bool:
    """Whether attention on this device goes document by document: on the CPU, except in a compiled model, which would be compiled again for
    each list of lengths."""
    return device.type == "cpu" and not torch.compiler.is_compiling()
