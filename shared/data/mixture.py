"""Chapter 03. A data mixture: packed rows of several sources with fixed sampling weights, each a share of the training tokens.

Each row comes from the source that is furthest behind its share, without a draw. So after any row every source has given its weight of
the tokens, to within a row or two; which source comes next is a function of the counts alone, and a resumed run, on any number of ranks,
sees the same rows. An exhausted source is reshuffled and begins again.

Left out on purpose: shares that change during training.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shared.course.errors import CourseError
from shared.data.loader import PackedLoader, StatefulLoader
from shared.data.rows import Documents, PackedRows, Position, Row, RowIndex, Transform, padding_row
from shared.data.shards import TokenStore
from shared.data.source import Source
from shared.totals import Batch


class SourceDocuments(Documents):
    """The documents of one source in a store: from `first` up to, not including, `last`."""

    def __init__(self, store: TokenStore, first: int, last: int):
        super().__init__(store)
        self.first, self.lengths, self.fingerprint = first, store.lengths[first:last], f"{store.fingerprint}[{first}:{last}]"

    def document(self, number: int) -> np.ndarray:
        return super().document(self.first + number)

    def trained(self, number: int) -> np.ndarray | None:
        return super().trained(self.first + number)


class MixedIndex(NamedTuple):
    source: str
    index: RowIndex


class MixedRows:
    """A dataset of rows from several datasets.

    Args:
        datasets: name -> rows without an end.
        weights: name -> share of the tokens, any positive numbers: they are divided by their sum.
    """

    def __init__(self, datasets: Mapping[str, PackedRows], weights: Mapping[str, float]):
        if set(datasets) != set(weights):
            raise CourseError(f"The mixture has sources {sorted(datasets)} and weights for {sorted(weights)}: give each source one.")
        if not datasets or any(not 0 < weight < float("inf") for weight in weights.values()):
            raise CourseError(f"The weights are {dict(weights)}: give every source a positive one, or leave it out.")
        if len({rows.seq for rows in datasets.values()}) > 1 or any(rows.epochs is not None for rows in datasets.values()):
            raise CourseError("The sources of a mixture need rows of one length, and no end.")
        self.datasets = dict(sorted(datasets.items()))  # ties go by name
        total = sum(weights.values())
        self.weights = {name: weights[name] / total for name in self.datasets}
        self.seq = next(iter(datasets.values())).seq

    @property
    def rows(self) -> int:
        """Rows of all sources, each gone through once."""
        return sum(rows.rows for rows in self.datasets.values())

    def settings(self) -> dict[str, Any]:
        of_datasets = {f"{name}: {key}": value for name, rows in self.datasets.items() for key, value in rows.settings().items()}
        return {"weights": self.weights} | of_datasets

    def initial_state(self) -> Position:
        return {name: {"tokens": 0, "next": rows.initial_state()} for name, rows in self.datasets.items()}

    def next_indices(self, position: Position, count: int) -> tuple[list[MixedIndex], Position]:
        """The indices of the next `count` rows, and the position after them."""
        after, indices = {name: dict(state) for name, state in position.items()}, []
        total = sum(state["tokens"] for state in after.values())
        for _ in range(count):
            # Rounded, so that a tie is a tie on every machine; the first of those furthest behind.
            wanted = total + self.seq
            source = max(self.datasets, key=lambda name: round(self.weights[name] * wanted - after[name]["tokens"], 6))  # noqa: B023
            rows, state = self.datasets[source], after[source]
            [index], state["next"] = rows.next_indices(state["next"], 1)
            indices.append(MixedIndex(source, index))
            tokens = rows.token_count(index)
            state["tokens"] += tokens
            total += tokens
        return indices, after

    def row(self, index: MixedIndex) -> Row:
        return self.datasets[index.source].row(index.index)

    def padding(self) -> Batch:
        return padding_row(self.seq)


class MixedLoader(StatefulLoader):
    """Packed rows of several stores in fixed shares of the tokens.

    Args:
        stores: name -> store; all made by one tokenizer.
        weights: name -> share of the tokens.
        transform: on every store.

    The others are those of `PackedLoader`.
    """

    def __init__(
        self,
        stores: Mapping[str, TokenStore | SourceDocuments],
        weights: Mapping[str, float],
        *,
        seq: int,
        seed: int = 0,
        transform: Transform | None = None,
        slack: int = 0,
        strategy: str = "best_fit",
        **options: Any,
    ):
        if len({store.tokenizer for store in stores.values()}) > 1:
            raise CourseError("The stores of a mixture were made by different tokenizers: prepare all of them with one.")
        datasets = {name: PackedRows(store, seq, seed, None, transform, slack, strategy) for name, store in stores.items()}
        super().__init__(MixedRows(datasets, weights), **options)


def training_loader(
    store: TokenStore, sources: Sequence[Source], documents: Sequence[int], *, epochs: int | None = None, **options: Any
) -> StatefulLoader:
    """Rows of all sources: in the proportions of the text, or, where sources have weights, in theirs.

    Args:
        store: the documents of all sources, one source after the other.
        documents: how many are each source's.
        epochs, options: of `PackedLoader`.
    """
    if sources[0].weight is None:
        return PackedLoader(store, epochs=epochs, **options)
    ends = np.cumsum(documents).tolist()
    names = [f"{number} {source.path}" for number, source in enumerate(sources)]
    stores = {name: SourceDocuments(store, end - count, end) for name, count, end in zip(names, documents, ends, strict=True)}
    if empty := [source.path for source, count in zip(sources, documents, strict=True) if not count]:
        raise CourseError(f"No document of {empty[0]} is left to train on, and it has a weight: leave it out, or clean less strictly.")
    return MixedLoader(stores, {name: source.weight for name, source in zip(names, sources, strict=True)}, **options)


def shares_in_words(sources: Sequence[Source]) -> str | None:
    """"70 % a, 30 % b" for sources with weights."""
    if sources[0].weight is None:
        return None
    total = sum(source.weight for source in sources)
    return ", ".join(f"{source.weight / total:.0%} {source.path}" for source in sources)
