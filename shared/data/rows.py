"""Chapter 03. The dataset of packed rows, shuffled and without an end: row number n is a function of the seed and of n.

Each epoch shuffles the documents, plans rows for them, and shuffles the rows; the shuffle is drawn from (seed, epoch), a transform's
draws from (seed, epoch, row, segment). So any row can be made again by its index alone, on any rank, before or after
a restart: an index is two numbers, `RowIndex(epoch, row)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.course.errors import CourseError
from shared.data import packing
from shared.data.shards import TokenStore
from shared.loss import IGNORED
from shared.totals import Batch

Position = dict[str, Any]  # the state of a dataset of rows, in values that JSON can hold
Transform = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # ids of one piece of text -> other ids


class RowIndex(NamedTuple):
    """The next row: `row` in the shuffled order of `epoch`, both from 0."""

    epoch: int
    row: int


class Row(NamedTuple):
    """One row, [seq] int64 tensors, and how many of its segments stayed as they were because the transform's result did not fit."""

    tensors: Batch
    skipped: int


class Documents:
    """The documents of a token store, and the rows that are planned and made of them. Subclasses make rows of other kinds.

    Args:
        before: ids that come before each document and are not trained: virtual tokens.

    Attributes:
        lengths: [documents], by which rows are planned.
        fingerprint: of all that decides what is in a row.
    """

    def __init__(self, store: "TokenStore | Documents", before: Sequence[int] = ()):
        self.store, self.before = store, np.array(before, dtype=np.int64)
        self.folder, self.tokenizer, self.lengths = store.folder, store.tokenizer, store.lengths + len(before)
        self.fingerprint = f"{store.fingerprint}+{list(before)}" if len(before) else store.fingerprint

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> np.ndarray:
        """[tokens] ids."""
        ids = self.store.document(number)
        return np.concatenate([self.before, ids]) if len(self.before) else ids

    def trained(self, number: int) -> np.ndarray | None:
        """[tokens] bool; None where all are trained."""
        trained = self.store.trained(number)
        return np.concatenate([np.zeros(len(self.before), dtype=bool), trained]) if len(self.before) else trained

    def plan(self, lengths: np.ndarray, seq: int, strategy: str = "best_fit", slack: int = 0) -> packing.RowPlan:
        """Rows for documents of these lengths."""
        return packing.plan_rows(lengths, seq, strategy, slack)

    def piece(self, segment: packing.Segment) -> np.ndarray:
        return self.document(segment.document)[segment.start : segment.stop]

    def row(self, segments: Sequence[packing.Segment], seq: int) -> Batch:
        """The row that holds these segments, [seq] each; without any, a row of padding."""
        if not segments:
            return padding_row(seq)
        row = packing.pack_documents([as_ids(self.piece(segment)) for segment in segments], seq)
        return masked(row, [trained_of(self, *segment) for segment in segments])


def documents_of(store: TokenStore | Documents) -> Documents:
    return store if isinstance(store, Documents) else Documents(store)


class PackedRows:
    """The rows of one store.

    Args:
        store: where the tokens are, or a view of it.
        seq: positions in a row.
        seed: of the shuffles and of what the transform draws.
        epochs: how many times through the store; None for no end.
        transform: transform(ids, generator) -> ids, called on each segment of each row: a whole document, or a piece of one that
            is longer than a row. Same ids for the same generator state. One whose result does not fit into its row is left out
            for that segment, and counted.
        slack: positions that a row keeps free for each segment, for a transform that adds tokens.
        strategy: of `plan_rows`.
    """

    def __init__(
        self,
        store: TokenStore | Documents,
        seq: int,
        seed: int,
        epochs: int | None = None,
        transform: Transform | None = None,
        slack: int = 0,
        strategy: str = "best_fit",
    ):
        if not (store.lengths > 1).any():
            raise CourseError(f"{store.folder} holds no document of two tokens or more: there is nothing to predict.")
        if transform and store.trained(0) is not None:
            raise CourseError(f"{store.folder} says which tokens are trained, and a transform would move them: leave the transform out.")
        self.store, self.seq, self.seed, self.epochs = documents_of(store), seq, seed, epochs
        self.transform, self.slack, self.strategy = transform, slack, strategy
        self.plans: dict[int, tuple[packing.RowPlan, np.ndarray, np.ndarray]] = {}

    def settings(self) -> dict[str, Any]:
        """What decides which rows there are: two runs with equal settings see the same ones."""
        sizes = {"seed": self.seed, "seq": self.seq, "slack": self.slack, "strategy": self.strategy}
        return sizes | {"transform": described(self.transform), "data": self.store.fingerprint}

    def plan(self, epoch: int) -> tuple[packing.RowPlan, np.ndarray, np.ndarray]:
        """The epoch's plan, the documents that its numbers stand for, and the order of its rows."""
        if epoch not in self.plans:
            generator = np.random.default_rng([self.seed, epoch])
            documents = generator.permutation(len(self.store))
            plan = self.store.plan(self.store.lengths[documents], self.seq, self.strategy, self.slack)
            # A batch may hold the end of one epoch and the beginning of the next, never more than is kept here.
            self.plans = dict([*self.plans.items()][-1:]) | {epoch: (plan, documents, generator.permutation(plan.rows))}
        return self.plans[epoch]

    def padding(self) -> Batch:
        """A row that holds nothing."""
        return self.store.row([], self.seq)

    @property
    def rows(self) -> int:
        """Rows of an epoch. Every epoch has as many: which rows there are depends on the documents' lengths, not on their order."""
        return self.plan(0)[0].rows

    def initial_state(self) -> Position:
        return {"epoch": 0, "row": 0}

    def next_indices(self, position: Position, count: int) -> tuple[list[RowIndex], Position]:
        """The indices of the next `count` rows, fewer at the end of the last epoch, and the position after them."""
        index, indices = RowIndex(**position), []
        while len(indices) < count and (self.epochs is None or index.epoch < self.epochs):
            indices.append(index)
            index = RowIndex(index.epoch, index.row + 1)
            if index.row >= self.plan(index.epoch)[0].rows:
                index = RowIndex(index.epoch + 1, 0)
        return indices, index._asdict()

    def token_count(self, index: RowIndex) -> int:
        """Tokens that a row predicts, before any transform."""
        plan, _, order = self.plan(index.epoch)
        return sum(segment.stop - segment.start - 1 for segment in plan.segments(int(order[index.row])))

    def row(self, index: RowIndex) -> Row:
        """Make the row at an index."""
        plan, documents, order = self.plan(index.epoch)
        number = int(order[index.row])
        segments = [segment._replace(document=int(documents[segment.document])) for segment in plan.segments(number)]
        if not self.transform:
            return Row(self.store.row(segments, self.seq), 0)
        pieces = [self.store.piece(segment) for segment in segments]
        skipped = self.apply_transform(pieces, index.epoch, number)
        return Row(packing.pack_documents([as_ids(piece) for piece in pieces], self.seq), skipped)

    def apply_transform(self, pieces: list[np.ndarray], epoch: int, row: int) -> int:
        """Transform the pieces in place where the result fits; how many did not."""
        room = self.seq - sum(len(piece) - 1 for piece in pieces)
        skipped = 0
        for segment, piece in enumerate(pieces):
            made = self.transform(piece, np.random.default_rng([self.seed, epoch, row, segment]))
            if 2 <= len(made) <= len(piece) + room:
                room -= len(made) - len(piece)
                pieces[segment] = made
            else:
                skipped += 1
        return skipped


def described(transform: Transform | None) -> str | None:
    """A transform by its settings, if it keeps any, or by its name."""
    if transform is None:
        return None
    return f"{getattr(transform, '__name__', type(transform).__name__)}({getattr(transform, 'config', '')})"


def trained_of(store: Documents, document: int, start: int, stop: int) -> np.ndarray | None:
    """[predictions] bool: which targets of a piece of a document are trained; None where all are, as in a store that does not say."""
    trained = store.trained(document)
    return None if trained is None else trained[start + 1 : stop]


def masked(row: Batch, trained: list[np.ndarray | None]) -> Batch:
    """A packed row whose targets are -100 where a piece's token is not trained. trained: of each piece, as `trained_of` gives it."""
    if any(each is None for each in trained):
        return row
    counted = torch.from_numpy(np.concatenate(trained))
    row["targets"][: len(counted)][~counted] = IGNORED
    return row


def padding_row(seq: int) -> Batch:
    """A row that holds nothing, which fills up a last batch: [seq] int64 each."""
    nothing: Tensor = torch.zeros(seq, dtype=torch.int64)
    padding = torch.full_like(nothing, packing.PADDING)
    return {"input_ids": nothing, "targets": torch.full_like(nothing, IGNORED), "documents": padding, "positions": nothing}


def stack_rows(rows: list[Batch]) -> Batch:
    """Rows [seq] to one batch [rows, seq]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def as_ids(tokens: np.ndarray) -> Tensor:
    """[tokens] of any integer dtype as an int64 tensor of its own: a store's arrays are files, and must not be written to."""
    return torch.from_numpy(np.array(tokens, dtype=np.int64))
