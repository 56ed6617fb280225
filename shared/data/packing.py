"""Chapter 03. Sequence packing: several documents in one row, kept apart by a document mask.

A row of seq positions that held one short document would be mostly padding, which costs as much as text. So rows are filled
with several documents, and two things keep them apart: `documents` says which positions belong together (a mask for attention)
and `positions` counts from 0 in each. `plan_rows` decides which document goes where, `pack_documents` makes one row.

Two ways to plan. "sequential" lays the documents end to end and cuts the line every seq predictions: full rows, and a cut
wherever a row happens to end. "best_fit" cuts only what is longer than a row, and puts each piece, longest first, into the
fullest row that still has room (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.course.binding import exercise
from shared.totals import Batch

PADDING = -1  # the document number of positions that hold none


@exercise("03.pack_documents")
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


class Segment(NamedTuple):
    """Tokens start .. stop - 1 of a document: stop - start - 1 predictions. Two pieces of one document share a token."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlan:
    """Which pieces of which documents make up each row, as arrays: 12 bytes a piece and 8 a row.

    seq: positions in a row.
    offsets: [rows + 1] int64; row r holds pieces offsets[r] .. offsets[r + 1] - 1.
    document, start, stop: [pieces] int32, sorted by row.
    """

    seq: int
    offsets: np.ndarray
    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def pieces(self) -> int:
        return len(self.document)

    @property
    def predictions(self) -> int:
        """How many positions of all rows hold an input with a target."""
        return int((self.stop.astype(np.int64) - self.start - 1).sum())

    @property
    def filled(self) -> float:
        """The share of all positions that hold a prediction; the rest is padding."""
        return self.predictions / (self.rows * self.seq) if self.rows else 0.0

    def segments(self, row: int) -> list[Segment]:
        """The pieces of one row, in the order in which they lie in it."""
        if not 0 <= row < self.rows:
            raise IndexError(f"There is no row {row}: the plan has {self.rows}, counted from 0.")
        here = slice(self.offsets[row], self.offsets[row + 1])
        return list(map(Segment, self.document[here].tolist(), self.start[here].tolist(), self.stop[here].tolist()))


def plan_rows(lengths: np.ndarray, seq: int, strategy: Literal["best_fit", "sequential"] = "best_fit", slack: int = 0) -> RowPlan:
    """Rows for documents of these lengths, so that every token but a document's last is an input exactly once.

    The same arguments give the same plan. Documents are told apart by their place in `lengths` alone, and among pieces of one
    length the earlier one is placed first, so shuffled documents get other neighbours. "best_fit" puts long documents
    into the first rows: shuffle the rows too.

    Args:
        lengths: [documents] integers, tokens in each document, its end token included. One with fewer than 2 predicts
            nothing and is in no row.
        seq: positions in a row.
        strategy: "best_fit" or "sequential"; see the module's docstring.
        slack: positions kept free for each piece, for a transform that adds tokens. "best_fit" only.

    Raises:
        ValueError: an unknown strategy, a row without room for a prediction, `slack` with "sequential", or a document of 2**31 tokens.
    """
    if strategy not in ("best_fit", "sequential"):
        raise ValueError(f"strategy is {strategy!r}: choose 'best_fit' or 'sequential'.")
    if seq - slack < 1 or slack < 0:
        raise ValueError(f"A row of {seq} positions with a slack of {slack} for each piece holds no prediction: give a larger seq.")
    if slack and strategy == "sequential":
        raise ValueError("strategy 'sequential' fills rows to the last position: with slack use 'best_fit'.")
    predictions = np.maximum(np.asarray(lengths, dtype=np.int64) - 1, 0)
    if len(predictions) and predictions.max() >= 2**31 - 1:
        raise ValueError(f"Document {predictions.argmax()} has {predictions.max() + 1} tokens: split documents below 2**31 tokens.")
    if strategy == "sequential":
        document, start, size, row = cut_every(predictions, seq)
    else:
        document, start, size = cut_long(predictions, seq - slack)
        row = best_fit(size + slack, seq)
    order = np.argsort(row, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row))]) if len(row) else np.zeros(1, np.int64)
    columns = (column[order].astype(np.int32) for column in (document, start, start + size + 1))
    return RowPlan(seq, offsets.astype(np.int64), *columns)


def cut_every(predictions: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lay documents end to end and cut at each document's end and at each row's: (document, start, size, row) of each piece."""
    ends = np.cumsum(predictions)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.append(np.arange(0, total, seq), total))
    first, last = cuts[:-1], cuts[1:]
    document = np.searchsorted(ends, first, side="right")
    return document, first - (ends - predictions)[document], last - first, first // seq


def cut_long(predictions: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of at most `most` predictions, all of a document but its last one full: (document, start, size) of each."""
    pieces = -(-predictions // most)
    document = np.repeat(np.arange(len(predictions)), pieces)
    place = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = place * most
    return document, start, np.minimum(predictions[document] - start, most)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: the row of each piece. sizes: [pieces], each in 1 .. capacity.

    Pieces of one size are placed together. The fullest row with room for one takes as many as it can, since after the first
    it is fuller still. So the work is one small array operation for each (size, room) that occurs, not one for each piece.
    """
    row_of = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    values, counts = np.unique(-sizes, return_counts=True)
    rooms: dict[int, np.ndarray] = {}  # positions left -> the rows that have them
    present = np.zeros(capacity + 1, dtype=bool)  # the keys of `rooms`
    rows = done = 0
    for size, count in zip((-values).tolist(), counts.tolist(), strict=True):
        placed, left = [], count
        moved: list[tuple[int, np.ndarray]] = []
        for room in (np.flatnonzero(present[size:]) + size).tolist():
            if left == 0:
                break
            taken, moves = fill(rooms.pop(room), room, size, left)
            present[room] = False
            placed.append(taken)
            moved += moves
            left -= len(taken)
        if left:
            opened = np.arange(rows, rows - (-left // (capacity // size)))
            rows += len(opened)
            taken, moves = fill(opened, capacity, size, left)
            placed.append(taken)
            moved += moves
        for room, which in moved:
            rooms[room] = np.concatenate([rooms[room], which]) if room in rooms else which
            present[room] = True
        row_of[order[done : done + count]] = np.concatenate(placed)
        done += count
    return row_of


def fill(which: np.ndarray, room: int, size: int, count: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Put up to `count` pieces of `size` into rows `which`, each with `room` positions left.

    Returns:
        the row of each piece that found a place, and (positions left, rows) for all of `which`.
    """
    each = room // size
    full, rest = divmod(min(count, each * len(which)), each)
    taken = np.repeat(which[: full + bool(rest)], each)[: full * each + rest]
    after = [(room - each * size, which[:full]), (room - rest * size, which[full : full + bool(rest)]), (room, which[full + bool(rest) :])]
    return taken, [(left, some) for left, some in after if len(some)]
