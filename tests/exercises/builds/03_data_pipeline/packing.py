"""Stage 7 of build 03: documents in rows. Every id of the cases is another one, so that each prediction says where it comes from.

How many rows there may be is counted by best fit, decreasing, on numbers alone.
"""

import random
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import TEXT, WITHIN, Results

NAMES = ("input_ids", "targets", "documents", "positions")
BEST_FIT = "best fit, decreasing, counted on lengths alone"


def documents_of(lengths: list[int], first: int = 0) -> list[list[int]]:
    """Documents of these lengths whose ids count on from `first`."""
    found = []
    for length in lengths:
        found.append(list(range(first, first + length)))
        first += length
    return found


def best_fit(lengths: list[int], width: int) -> int:
    """How many rows best fit makes."""
    sizes = [min(width, length - 1 - first) for length in lengths for first in range(0, length - 1, width)]
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        room = min((room for room in rooms if room >= size), default=None)
        if room is None:
            rooms.append(width - size)
        else:
            rooms[rooms.index(room)] -= size
    return len(rooms)


def pieces_of(row: dict[str, Tensor]) -> tuple[list[list[int]], str]:
    """The pieces of a row, each its inputs and its last target, and what is wrong with the row, in words."""
    strange = [name for name in NAMES if name not in row or not isinstance(row[name], Tensor) or row[name].dtype != torch.int64]
    if strange:
        return [], f"{strange[0]} is missing, or no tensor of int64"
    if len({tuple(row[name].shape) for name in NAMES}) > 1:
        return [], "the four tensors have different shapes"
    inputs, targets, documents, positions = (row[name].tolist() for name in NAMES)
    pieces, fault = [], ""
    starts = [place for place, number in enumerate(documents) if number != -1 and (place == 0 or documents[place - 1] != number)]
    for place, start in enumerate(starts):
        stop = next((stop for stop in range(start, len(documents)) if documents[stop] != documents[start]), len(documents))
        pieces.append([*inputs[start:stop], targets[stop - 1]])
        if documents[start] != place:
            fault = fault or f"documents: {documents}"
        if positions[start:stop] != list(range(stop - start)):
            fault = fault or f"positions: {positions}"
        if targets[start : stop - 1] != inputs[start + 1 : stop]:
            fault = fault or f"input_ids: {inputs}, targets: {targets}"
    filled = len(documents) - documents.count(-1)
    if -1 in documents[:filled]:
        fault = fault or f"padding between pieces: documents {documents}"
    padding = {"input_ids": inputs[filled:], "targets": targets[filled:], "positions": positions[filled:]}
    for name, wanted in (("input_ids", 0), ("targets", -100), ("positions", 0)):
        if any(number != wanted for number in padding[name]):
            fault = fault or f"on padding {name} has {padding[name]}"
    return pieces, fault


def seen(rows: list[dict[str, Tensor]], documents: list[list[int]], width: int) -> Results:
    """What rows hold: pieces, predictions, faults."""
    found, faults = [], []
    for row in rows:
        pieces, fault = pieces_of(row)
        found += pieces
        faults += [fault] * bool(fault)
        if not fault and row["documents"].shape != (width,):
            faults.append(f"a row of shape {tuple(row['documents'].shape)}")
    wanted = {pair for ids in documents for pair in zip(ids, ids[1:])}
    pairs = [pair for piece in found for pair in zip(piece, piece[1:])]
    cuts = [sum(ids[0] <= piece[0] <= ids[-1] for piece in found) for ids in documents]
    few = [-(-(len(ids) - 1) // width) for ids in documents]
    return {
        "what is wrong with rows": faults[:1], "predictions that are missing": sorted(wanted - set(pairs))[:4],
        "predictions that no document has": sorted(set(pairs) - wanted)[:4], "predictions twice": len(pairs) - len(set(pairs)),
        "pieces too many, by document": {str(n): cut - least for n, (cut, least) in enumerate(zip(cuts, few)) if cut > least},
    }  # fmt: skip


RIGHT = {
    "what is wrong with rows": [], "predictions that are missing": [], "predictions that no document has": [], "predictions twice": 0,
    "pieces too many, by document": {},
}  # fmt: skip


def rows_within(count: int, limit: int) -> str:
    return WITHIN if count <= limit else f"{count} rows, and best fit makes {limit}"


def pack_case(title: str, lengths: list[int], width: int, first: int = 0, kind: str = "property", tensors: bool = False) -> Case:
    """first: the first id. 0 stands on padding, too, and -100 never is an id."""

    def observe(adapters: Any, documents: list[list[int]], width: int) -> Results:
        given = [torch.tensor(ids, dtype=torch.int32) for ids in documents] if tensors else documents
        rows = list(adapters.pack(given, width))
        before = documents_of(lengths, first)
        found = seen(rows, before, width)
        changed = [ids.tolist() for ids in given] != before if tensors else given != before
        return found | {"rows": rows_within(len(rows), best_fit(lengths, width)), "documents were changed": changed}

    expected = lambda **_: RIGHT | {"rows": WITHIN, "documents were changed": False}  # noqa: E731
    return Case(kind, title, lambda: {"documents": documents_of(lengths, first), "width": width}, expected, BEST_FIT, observe)


def drawn(count: int, most: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(2, most) for _ in range(count)]


def alike_case() -> Case:
    """Documents of equal ids, and of the id 0: nothing may follow from what ids are."""
    documents = [[0, 0, 0], [7, 7], [0, 0], [7, 0, 7, 0]]

    def observe(adapters: Any, documents: list[list[int]], width: int) -> Results:
        found = [pieces_of(row) for row in adapters.pack(documents, width)]
        pieces = sorted(str(piece) for pieces, _ in found for piece in pieces)
        return {"pieces": pieces, "what is wrong with rows": [fault for _, fault in found if fault][:1]}

    expected = lambda **_: {"pieces": sorted(map(str, documents)), "what is wrong with rows": []}  # noqa: E731
    return Case("property", "equal ids, and id 0", lambda: {"documents": documents, "width": 5}, expected, TEXT.format(7), observe)


def memory_case() -> Case:
    """Tensors of one row do not share their memory with another row or with the documents."""

    def observe(adapters: Any, documents: Tensor, width: int) -> Results:
        given = list(documents)
        rows = list(adapters.pack(given, width))
        before = [row["input_ids"].tolist() for row in rows]
        for name in NAMES:
            rows[0][name].fill_(5)
        kept = [row["input_ids"].tolist() for row in rows[1:]] == before[1:]
        same = [ids.tolist() for ids in given] == documents_of([6] * 4)
        return {"other rows stay as they were": kept, "documents stay as they were": same}

    given = lambda: {"documents": torch.tensor(documents_of([6] * 4)), "width": 5}  # noqa: E731
    expected = lambda **_: {"other rows stay as they were": True, "documents stay as they were": True}  # noqa: E731
    return Case("property", "a row that is changed", given, expected, TEXT.format(7), observe)


# First fit, worst fit and best fit without sorting make 11 rows of them or more, best fit, decreasing, 10.
TIGHT = [60, 35, 28, 26, 4, 19, 22, 19, 33, 57, 25, 46, 13, 20, 10, 43, 55, 9, 12, 32, 26]

PACK = (
    pack_case("one document and padding", [4], 6, first=5, kind="worked example"),
    pack_case("two documents in a row", [4, 2], 6, first=5, kind="worked example"),
    pack_case("a row that is just full", [4, 3, 2], 6, first=5, kind="worked example"),
    pack_case("no documents", [], 6, kind="worked example"),
    pack_case("a document that fills a row", [7], 6, first=5, kind="worked example"),
    pack_case("a document one longer than a row", [8], 6, first=5, kind="worked example"),
    pack_case("a document that fills two rows", [13], 6, first=5, kind="worked example"),
    pack_case("a long document, and short ones beside its rest", [22, 3, 2, 5], 6, first=5),
    pack_case("rows of one position", [3, 2, 5], 1, first=5),
    pack_case("the id 0 begins", [3, 4, 2], 6),
    alike_case(),
    pack_case("ids above 65,535, in tensors of int32", [4, 9, 3, 3], 6, first=70_000, tensors=True),
    memory_case(),
    pack_case("the emptiest row is needed later", [5, 7, 4, 13, 12], 18),
    pack_case("the first row with room is not the fullest", TIGHT, 59),
    pack_case("forty documents", drawn(40, 30, 1), 32),
    pack_case("short ones and long ones", drawn(20, 90, 2), 25),
    pack_case("three hundred documents", drawn(300, 70, 3), 64),
)  # fmt: skip
