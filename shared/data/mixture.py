"""Chapter 03. Mixtures: rows of several stores in fixed shares, without a draw.

Each row comes from the store that is furthest behind its share. So after n rows every store has given its weight times n, to within
a row or two, which store comes next is a function of the counts alone, and a resumed run, on any number of ranks, goes on alike.
A store that has been gone through is shuffled and begun again.

Left out on purpose: shares that change during training.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shared.course.errors import CourseError
from shared.data.loader import FeedLoader
from shared.data.rows import PackedRows, Place, Position, Row, Transform
from shared.data.shards import TokenStore


class MixedPlace(NamedTuple):
    source: str
    place: Place


class MixedRows:
    """A feed of rows from several feeds.

    Args:
        feeds: name -> rows without an end.
        weights: name -> share of the rows, any positive numbers: they are divided by their sum.

    Raises:
        CourseError: names that differ, weights that are not positive, or rows of different lengths.
    """

    def __init__(self, feeds: Mapping[str, PackedRows], weights: Mapping[str, float]):
        if set(feeds) != set(weights):
            raise CourseError(f"The mixture has sources {sorted(feeds)} and weights for {sorted(weights)}: give each source one.")
        if not feeds or any(not 0 < weight < float("inf") for weight in weights.values()):
            raise CourseError(f"The weights are {dict(weights)}: give every source a positive one, or leave it out.")
        if len({feed.seq for feed in feeds.values()}) > 1 or any(feed.epochs is not None for feed in feeds.values()):
            raise CourseError("The sources of a mixture need rows of one length, and no end.")
        self.feeds = dict(sorted(feeds.items()))  # ties go by name
        total = sum(weights.values())
        self.weights = {name: weights[name] / total for name in self.feeds}
        self.seq = next(iter(feeds.values())).seq

    def settings(self) -> dict[str, Any]:
        of_feeds = {f"{name}: {key}": value for name, feed in self.feeds.items() for key, value in feed.settings().items()}
        return {"weights": self.weights} | of_feeds

    def beginning(self) -> Position:
        return {name: {"rows": 0, "place": feed.beginning()} for name, feed in self.feeds.items()}

    def deal(self, position: Position, count: int) -> tuple[list[MixedPlace], Position]:
        """The places of the next `count` rows, and the position after them."""
        given = {name: position[name]["rows"] for name in self.feeds}
        order = []
        for number in range(sum(given.values()) + 1, sum(given.values()) + count + 1):
            # Rounded, so that a tie is a tie on every machine; the first of those furthest behind.
            source = max(self.feeds, key=lambda name: round(self.weights[name] * number - given[name], 9))
            given[source] += 1
            order.append(source)
        places, after = {}, {}
        for name, feed in self.feeds.items():
            dealt, place = feed.deal(position[name]["place"], order.count(name))
            places[name], after[name] = iter(dealt), {"rows": given[name], "place": place}
        return [MixedPlace(source, next(places[source])) for source in order], after

    def row(self, place: MixedPlace) -> Row:
        return self.feeds[place.source].row(place.place)


class MixedLoader(FeedLoader):
    """Packed rows of several stores in fixed shares.

    Args:
        stores: name -> store; all made by one tokenizer.
        weights: name -> share of the rows.
        transforms: name -> transform, for the stores that have one.

    The others are those of `PackedLoader`.

    Raises:
        CourseError: stores of different tokenizers, or what `MixedRows` and `FeedLoader` refuse.
    """

    def __init__(
        self,
        stores: Mapping[str, TokenStore],
        weights: Mapping[str, float],
        *,
        seq: int,
        batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        transforms: Mapping[str, Transform] | None = None,
        spare: int = 0,
        prefetch: int = 2,
    ):
        transforms = transforms or {}
        if unknown := set(transforms) - set(stores):
            raise CourseError(f"There are transforms for {sorted(unknown)}, and the stores are {sorted(stores)}.")
        if len({store.tokenizer for store in stores.values()}) > 1:
            raise CourseError("The stores of a mixture were made by different tokenizers: prepare all of them with one.")
        feeds = {
            name: PackedRows(store, seq, seed, transform=transforms.get(name), spare=spare if name in transforms else 0)
            for name, store in stores.items()
        }
        super().__init__(
            MixedRows(feeds, weights), batch_size=batch_size, micro_batch_size=micro_batch_size, rank=rank, ranks=ranks, prefetch=prefetch
        )
