"""Chapter 01. Batches of next-token prediction from a stream of token ids: inputs, and targets that are the inputs one position later.

The stream is cut into windows of seq + 1 ids. The first seq of them are the input, the last seq the targets, so each
position learns to say what comes next. Chapter 03 replaces this by a loader that packs documents and resumes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from shared.course.errors import CourseError
from shared.totals import Batch


def batch_at(stream: Tensor, starts: Tensor, seq: int) -> Batch:
    """The windows that begin at `starts`.

    Args:
        stream: [tokens] of any integer dtype.
        starts: [batch] int64, each at most tokens - seq - 1.

    Returns:
        `input_ids` and `targets`, both [batch, seq] int64, with targets[b, s] = stream[starts[b] + s + 1].
    """
    windows = stream[starts[:, None] + torch.arange(seq + 1)].long()
    return {"input_ids": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def random_batches(stream: Tensor, batch_size: int, seq: int, generator: Generator) -> Iterator[Batch]:
    """Endless batches of windows from random places, the same ones for the same generator state."""
    require_window(stream, seq)
    while True:
        starts = torch.randint(len(stream) - seq, (batch_size,), generator=generator)
        yield batch_at(stream, starts, seq)


def sequential_batches(stream: Tensor, batch_size: int, seq: int, limit: int | None = None) -> Iterator[Batch]:
    """Consecutive windows for evaluation: each target once, the last batch possibly smaller.

    Args:
        limit: at most this many windows, spread evenly over the stream; None for all. The rest of the stream that
            does not fill a window is left out.
    """
    require_window(stream, seq)
    starts = torch.arange(0, len(stream) - seq, seq)
    if limit is not None and limit < len(starts):
        starts = starts[torch.arange(limit) * len(starts) // limit]
    for chunk in starts.split(batch_size):
        yield batch_at(stream, chunk, seq)


def split_batch(batch: Batch, micro_batch_size: int) -> list[Batch]:
    """Cut a batch along its first dimension into micro-batches of at most `micro_batch_size` rows."""
    pieces = {name: tensor.split(micro_batch_size) for name, tensor in batch.items()}
    return [dict(zip(pieces, parts, strict=True)) for parts in zip(*pieces.values(), strict=True)]


def as_microbatches(step: Any) -> list[Batch]:
    """A step's micro-batches: several batches, or a single one, as PyTorch's `DataLoader` yields them."""
    alone = isinstance(step, Mapping | Tensor | str) or is_pair(step)
    return [as_batch(batch) for batch in ([step] if alone else step)]


def as_batch(given: Any) -> Batch:
    """A batch by names: as it is, or of a pair (x, y), `input_ids` x and `targets` y."""
    if isinstance(given, Mapping):
        return dict(given)
    if is_pair(given):
        return {"input_ids": given[0], "targets": given[1]}
    raise CourseError(
        f"The loader yielded {type(given).__name__} as a batch: yield a dictionary of tensors, a pair (x, y), or a list of these as "
        "micro-batches."
    )


def is_pair(given: Any) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(each, Tensor) for each in given)


def require_window(stream: Tensor, seq: int) -> None:
    if len(stream) <= seq:
        raise ValueError(f"The text has {len(stream)} tokens, fewer than one window of {seq} + 1: give more text or a smaller seq.")
