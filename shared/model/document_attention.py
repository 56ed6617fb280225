"""Chapter 02. Variable-length attention of packed rows, document by document: no score between two documents is computed.

A mask hides pairs of positions after PyTorch's kernel has computed them, and it keeps the kernel from skipping what a causal pattern hides.
In a row of 2,048 positions that holds documents of 200, nine pairs in ten lie between documents. Here each document is attended to by
itself: on the CPU in a call of the kernel for each of them, on a GPU in one call of FlashAttention's kernel for variable lengths (Dao
2023), which takes the places where documents start. The host must know the longest one, and never waits for the GPU: documents are read
from the batch's entry that stayed on the host (`shared.devices.on_host`).

Left out on purpose: documents of one length in one call on the CPU; too few have the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.devices import on_host, sent
from shared.totals import Batch

FEWEST_POSITIONS = 512  # in a row; in shorter ones the calls cost as much as the pairs that they save (tests/benchmarks/README.md)
FEWEST_ON_GPU = 2048  # elsewhere 0.72 times a mask's speed was measured at 512, 1.31 at 2,048, 2.34 at 8,192
PAIRS_OF_A_CALL = 2500  # a call for one more document costs about as much as this many pairs of positions


class PackedDocuments(NamedTuple):
    """The documents of packed rows, of padding too, one row after the other.

    lengths: positions in each. rows: how many rows these are, at least 1; one row may stand for all of a batch.
    starts: [documents + 1] int32, where each begins and the last one ends, on the device of the batch. longest: the next power of two from
        the largest length on, at most a row, so that a compiled model seldom meets another one.
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
    longest = min(1 << (max(lengths) - 1).bit_length(), ids.shape[1])
    return PackedDocuments(lengths, len(ids), sent(starts.int(), device), longest)


def pack_on_gpu(batch: Batch) -> PackedDocuments | None:
    """The documents of a batch on a GPU whose kernel for variable lengths takes them. None where a mask is faster, the kernel is missing,
    or the host would have to wait for the GPU."""
    ids = batch["documents"]
    known = ids.is_cuda and "documents_on_host" in batch and ids.shape[1] >= FEWEST_ON_GPU
    if not known or torch.__version__ < "2.13" or torch.cuda.get_device_capability(ids.device) < (8, 0):
        return None
    return pack_of(on_host(batch, "documents"), ids.device)


def attend_documents(queries: Tensor, keys: Tensor, values: Tensor, mask: DocumentMask, scale: float, dropout: float) -> Tensor:
    """Scaled dot-product attention within each document: [batch, H, seq, d]. On a GPU without dropout, in 16 bits, and over all rows.

    Args:
        queries: [batch, H, seq, d].
        keys, values: [batch, K, seq, d]; K divides H.
        mask: over these rows, or over one row that stands for all.
    """
    if queries.is_cuda:
        return attend_at_once(queries, keys, values, mask, scale)
    lengths = mask.documents.lengths * (len(queries) // mask.documents.rows)
    groups = queries.shape[1] // keys.shape[1]
    each = (tensor.transpose(1, 2).flatten(0, 1).split(lengths) for tensor in (queries, keys, values))  # [length, heads, d]
    mixed = [attend_one(*(part.transpose(0, 1)[None] for part in document), mask, scale, dropout, groups) for document in zip(*each)]
    return torch.cat(mixed, dim=2).squeeze(0).transpose(0, 1).unflatten(0, (len(queries), -1)).transpose(1, 2)


def attend_at_once(queries: Tensor, keys: Tensor, values: Tensor, mask: DocumentMask, scale: float) -> Tensor:
    """The same by the kernel for variable lengths, rounded as autocast would."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = mask.documents.starts, mask.documents.longest
    dtype = torch.get_autocast_dtype(queries.device.type)
    flat = (tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (queries, keys, values))  # [batch * seq, heads, d]
    window = (-1 if mask.window is None else mask.window - 1, 0 if mask.causal else -1)  # positions back and ahead, itself not counted
    grouped = queries.shape[1] != keys.shape[1]
    mixed = varlen_attn(*flat, starts, starts, longest, longest, scale=scale, window_size=window, enable_gqa=grouped)
    return mixed.unflatten(0, (len(queries), -1)).transpose(1, 2)


def varlen_operator() -> Any:
    """The operator of PyTorch's kernel for variable lengths; selective recomputation keeps its results."""
    import torch.nn.attention.varlen

    return torch.ops.torch_attn._varlen_attn.default


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


def takes_documents(device: torch.device, head_dim: int, dropout: float) -> bool:
    """Whether attention goes document by document: on the CPU, except in a compiled model, which would be compiled again for each list of
    lengths; on a GPU under autocast in 16 bits, for heads that the kernel takes, and without dropout, which it has not."""
    if device.type == "cpu":
        return not torch.compiler.is_compiling()
    return device.type == "cuda" and torch.is_autocast_enabled("cuda") and not dropout and head_dim % 8 == 0 and head_dim <= 192
