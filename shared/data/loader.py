"""Chapter 03. The stateful dataloader: each step's micro-batches for one rank, prefetched, and a position that any layout can resume from.

Rows are counted globally, in the order in which training sees them: step k takes rows k * batch_size and on, rank r its share of
them. So the position is one number for all ranks, and a run that stops after n rows resumes with row n, also with other ranks,
another batch or micro-batch size. It counts rows that were handed out, not those that the thread has prefetched. Where ranks do not
divide a batch, shares differ by one row and are filled up with padding, so that all ranks run the same number of equal micro-batches.

Left out on purpose: moving batches to a device, which is the engine's (chapter 04), and worker processes: slicing rows out of
memory-mapped files takes one thread under 1 % of a training step.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shared.batches import split_batch
from shared.course.errors import CourseError
from shared.data.rows import Documents, PackedRows, Position, Row, Transform, documents_of, stack_rows, trained_of
from shared.data.shards import TokenStore
from shared.totals import Batch


class RowDataset(Protocol):
    """Where a loader takes its rows: `PackedRows`, or a mixture of several. `seq` is the positions in a row."""

    seq: int

    def settings(self) -> dict[str, Any]:
        """What decides which rows there are, in values that JSON can hold."""

    def initial_state(self) -> Position:
        """The position before the first row."""

    def next_indices(self, position: Position, count: int) -> tuple[list, Position]:
        """The indices of the next `count` rows, fewer at the end, and the position after them. Cheap: reads no token."""

    def row(self, index: Any) -> Row:
        """Make the row at an index: the same one whenever and wherever it is made."""

    def padding(self) -> Batch:
        """A row that holds nothing, for the last step of a dataset that ends."""


class Step(NamedTuple):
    """A step of this rank: its micro-batches, and the dataset's position after it."""

    microbatches: list[Batch]
    position: Position
    sample: int
    skipped: int


class StatefulLoader:
    """Batches from any dataset of rows.

    Iterating yields a step's micro-batches, each a dict of [rows, seq] int64 tensors as `pack_documents` makes them, from
    the current position on. A last step with fewer rows is filled with rows of padding, which count nothing, so that all ranks take equally
    many steps of equal shapes.

    Args:
        dataset: where the rows come from.
        batch_size: rows in a step, over all ranks.
        micro_batch_size: rows in a micro-batch, at most.
        rank, ranks: which share of each step this loader yields.
        prefetch: steps to make ahead in a thread; 0 for none.

    Attributes:
        sample: rows handed out so far, over all ranks.
        skipped: segments of this rank's rows that stayed as they were because the transform's result did not fit.
    """

    def __init__(
        self, dataset: RowDataset, *, batch_size: int, micro_batch_size: int | None = None, rank: int = 0, ranks: int = 1, prefetch: int = 2
    ):
        micro_batch_size = micro_batch_size or max(1, -(-batch_size // max(ranks, 1)))
        require_sizes(batch_size, micro_batch_size, rank, ranks)
        self.dataset, self.rank, self.ranks, self.prefetch = dataset, rank, ranks, prefetch
        self.batch_size, self.share, self.micro_batch_size = batch_size, batch_size, micro_batch_size
        if ranks > 1:
            count, self.micro_batch_size = equal_microbatches(batch_size, micro_batch_size, ranks)
            self.share = count * self.micro_batch_size
        self.position, self.sample, self.skipped = dataset.initial_state(), 0, 0

    def __iter__(self) -> Iterator[list[Batch]]:
        steps = prefetch(self.steps(), self.prefetch)
        try:
            for step in steps:
                self.position, self.sample = step.position, step.sample
                self.skipped += step.skipped
                yield step.microbatches
        finally:
            steps.close()

    def steps(self) -> Iterator[Step]:
        """All steps from here on; run by the thread, so it changes nothing of the loader."""
        position, sample = self.position, self.sample
        first, last = (self.batch_size * rank // self.ranks for rank in (self.rank, self.rank + 1))
        while True:
            indices, position = self.dataset.next_indices(position, self.batch_size)
            if not indices:
                return
            sample += len(indices)
            rows = [self.dataset.row(index) for index in indices[first:last]]
            tensors = [row.tensors for row in rows] + [self.dataset.padding() for _ in range(self.share - len(rows))]
            microbatches = split_batch(stack_rows(tensors), self.micro_batch_size)
            yield Step(microbatches, position, sample, sum(row.skipped for row in rows))

    def state_dict(self) -> dict[str, Any]:
        """The global position: the same on every rank, small, and JSON."""
        return {"sample": self.sample, "position": self.position, "settings": self.dataset.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader stood, whatever its ranks and batch sizes.

        Raises:
            CourseError: the rows after that position would be others: another seed, row length, or other data.
        """
        require_same_rows(state["settings"], self.dataset.settings())
        self.position, self.sample = state["position"], state["sample"]


class PackedLoader(StatefulLoader):
    """Shuffled, packed rows of one store: `StatefulLoader` over `PackedRows`, whose arguments these are."""

    def __init__(
        self,
        store: TokenStore,
        *,
        seq: int,
        batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        epochs: int | None = None,
        transform: Transform | None = None,
        slack: int = 0,
        strategy: str = "best_fit",
        prefetch: int = 2,
    ):
        rows = PackedRows(store, seq, seed, epochs, transform, slack, strategy)
        super().__init__(rows, batch_size=batch_size, micro_batch_size=micro_batch_size, rank=rank, ranks=ranks, prefetch=prefetch)


class EvaluationLoader:
    """Every token of a store once, packed and always in the same rows, for evaluation: yields batches, the last one possibly smaller.

    With several ranks, rank r takes every ranks-th row from r on, and all take equally many batches: a rank that has one row fewer
    gets one of padding. Iterating again begins again.

    Args:
        batch_size: rows in a batch of one rank.
        limit: at most this many rows, spread evenly; None for all.
    """

    def __init__(
        self, store: TokenStore | Documents, *, seq: int, batch_size: int, limit: int | None = None, rank: int = 0, ranks: int = 1
    ):
        require_sizes(batch_size * ranks, batch_size, rank, ranks)
        if not (store.lengths > 1).any():
            raise CourseError(f"{store.folder} holds no document of two tokens or more: there is nothing to predict.")
        self.store, self.seq, self.batch_size = documents_of(store), seq, batch_size
        self.plan = self.store.plan(store.lengths, seq)
        rows = np.arange(self.plan.rows)
        if limit is not None and limit < len(rows):
            rows = rows[np.arange(limit) * len(rows) // limit]
        self.rows: list[int | None] = rows[rank::ranks].tolist()
        self.rows += [None] * (-(-len(rows) // ranks) - len(self.rows))

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.rows), self.batch_size):
            yield stack_rows([self.row(number) for number in self.rows[first : first + self.batch_size]])

    def row(self, number: int | None) -> Batch:
        return self.store.row([] if number is None else self.plan.segments(number), self.seq)

    def byte_count(self, byte_lengths: np.ndarray) -> int:
        """The bytes of text that this rank's predictions cover, which bits per byte divides by.

        The first token of a document is given, not predicted, so its bytes do not count; nor do the bytes of tokens without a target.

        Args:
            byte_lengths: [vocab] of the tokenizer: `TextTokenizer.byte_lengths`.
        """
        total = 0
        for segment in (segment for number in self.rows if number is not None for segment in self.plan.segments(number)):
            ids, trained = self.store.document(segment.document)[segment.start + 1 : segment.stop], trained_of(self.store, *segment)
            total += int(byte_lengths[ids if trained is None else ids[trained]].sum())
        return total


def require_same_rows(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a saved position in data that would be other data here, by the first setting that differs."""
    for name in now:
        if saved.get(name) != now[name]:
            was, here = (shortened(settings.get(name)) for settings in (saved, now))
            raise CourseError(
                f"The data cannot go on where the checkpoint stood: its {name} was {was}, here it is {here}. "
                "Give the same, or begin a new run. To continue this run with other data, from its start: continue_with=data in a "
                "configuration, retune=['loader'] with fit."
            )


def require_full_step(loader: StatefulLoader) -> None:
    """Refuse text that does not fill one step, in which its rows would stand several times."""
    rows, seq = loader.dataset.rows, loader.dataset.seq
    if rows < loader.batch_size:
        one = "1 row" if rows == 1 else f"{rows:,} rows"
        raise CourseError(
            f"The text gives {one} of {seq:,} tokens, and a step takes {loader.batch_size:,}: give more text, a smaller batch_size, or "
            "a smaller seq."
        )


def require_sizes(batch_size: int, micro_batch_size: int, rank: int, ranks: int) -> None:
    if min(batch_size, micro_batch_size, ranks) < 1:
        raise CourseError(f"batch_size is {batch_size}, micro_batch_size {micro_batch_size}, ranks {ranks}: give at least 1 of each.")
    if not 0 <= rank < ranks:
        raise CourseError(f"There is no rank {rank} among {ranks}: ranks count from 0.")


def equal_microbatches(batch_size: int, micro_batch_size: int, ranks: int) -> tuple[int, int]:
    """A rank's micro-batches of a step, and the rows in each of them: as few of both as hold the largest share of a batch.

    >>> equal_microbatches(16, 4, 2), equal_microbatches(16, 4, 3), equal_microbatches(16, 8, 4)
    ((2, 4), (2, 3), (1, 4))
    """
    share = -(-batch_size // ranks)
    count = -(-share // micro_batch_size)
    return count, -(-share // count)


def shortened(value: Any) -> str:
    return f"{value[:12]!r}..." if isinstance(value, str) and len(value) > 20 else repr(value)


Value = TypeVar("Value")


def prefetch(values: Iterable[Value], count: int) -> Iterator[Value]:
    """The same values, of which a thread makes up to `count` in advance; with 0 there is none. Its error is raised where the values are
    consumed; ending the consumption, by `break` or by an error, stops it."""
    if count == 0:
        yield from values
        return
    made: queue.Queue = queue.Queue(maxsize=count)
    stop = threading.Event()

    def offer(entry: tuple) -> bool:
        while not stop.is_set():
            try:
                made.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for value in values:
                if not offer((value, None)):
                    return
            offer((None, StopIteration()))
        except BaseException as error:  # whatever it is, the consumer must hear of it
            offer((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            value, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value
    finally:
        stop.set()
        thread.join()
