"""The checks of chapter 03's repairs: a repaired program has the logits, ids, batches and weights of the right one.

Documents, texts, sizes and seeds differ from what the programs print, so that no repair can aim at what it sees. Tolerance: another way to
mask or to add up moves float64 by some 1e-15; 1e-9 is far from that and from any mistake.
"""

from collections.abc import Callable
from typing import Any

import torch

from shared.course.assignments import hunts
from shared.course.build_check import read_module
from shared.course.checking import Case, Check

NEAR = {"rtol": 1e-9, "atol": 1e-9}


def right(letter: str) -> Any:
    return read_module(hunts()[f"03.hunt.{letter}"].solution_file)


def case(stage: str, title: str, letter: str, given: dict[str, Any], figures: Callable[[Any], dict]) -> Case:
    """The right program and the repaired one on the same inputs."""
    expected, observe = lambda **_: figures(right(letter)), lambda program, **_: figures(program)  # noqa: E731
    return Case(stage, title, lambda: given, expected, "the right program", observe, **NEAR)


# a: documents of several lengths in a row.


def packed_case(title: str, lengths: list[int], width: int, seed: int) -> Case:
    documents, weights = right("a").example(seed, lengths)

    def figures(program: Any) -> dict[str, Any]:
        found = program.packed_logits([ids.clone() for ids in documents], width, weights)
        return {f"logits of document {number}": each for number, each in enumerate(found)}

    return case("row", title, "a", {"lengths": lengths, "width": width}, figures)


# b: texts whose ids look alike.


def merges_case(title: str, trained: str, text: str, count: int) -> Case:
    def figures(program: Any) -> dict[str, Any]:
        merges = program.train(trained, count)
        ids = program.encode(text, merges)
        return {"merges": [list(pair) for pair in merges], "ids": ids, "bytes": repr(program.decode(ids, merges))}

    return case("merges", title, "b", {"trained on": trained, "merges": count, "text": text}, figures)


# c: stops anywhere.


def stops_case(title: str, rows: int, batch_size: int, seed: int, batches: int, stops: list[int]) -> Case:
    def figures(program: Any) -> dict[str, Any]:
        return {"batches": [list(batch) for batch in program.run(rows, batch_size, seed, batches, stops)]}

    return case("stops", title, "c", {"rows": rows, "batch_size": batch_size, "batches": batches, "stopped after": stops}, figures)


# d: documents with and without end tokens inside.


def ends_case(title: str, documents: list[list[int]], width: int) -> Case:
    def figures(program: Any) -> dict[str, Any]:
        losses, table = program.train([list(ids) for ids in documents], width, 7, 1.5)
        return {"losses": torch.tensor(losses).double(), "logits": table}

    return case("ends", title, "d", {"documents": documents, "width": width}, figures)


POEM = "\n a\n b\n an n n on\n in an on\n\n\n 10 20 30\n aa aaa aaaa\n"
CASES = {
    "a": (
        packed_case("one document, and padding", [6], 9, 11),
        packed_case("two documents", [4, 5], 9, 12),
        packed_case("documents of one token, and padding", [1, 3, 1, 6], 13, 13),
        packed_case("six documents", [5, 2, 7, 3, 4, 6], 27, 14),
    ),
    "b": (
        merges_case("no merges", POEM, POEM, 0),
        merges_case("equal letters", "aaaa aaa aaaaa", "aaaaaaa aaa", 3),
        merges_case("a text with indented lines", POEM, "on an\n in n n\n", 12),
        merges_case("as many as can be", POEM, POEM[::-1], 100),
        merges_case("a text with indented lines behind signs", "in.\n on.\n an.\n.i .d .\nid", "in.id on.\n.di .\n", 14),
        merges_case("letters of two bytes", "\n é\n è ñ\n én èn n n\n" * 2, "én ñn\n é", 20),
    ),
    "c": (
        stops_case("no stop", 10, 2, 1, 14, []),
        stops_case("in the middle of epochs", 10, 2, 2, 14, [1, 7, 13]),
        stops_case("at the end of the first epoch", 12, 4, 3, 9, [3]),
        stops_case("at the end of each epoch", 8, 2, 4, 17, [4, 8, 12, 16]),
        stops_case("before every batch", 6, 2, 5, 11, list(range(11))),
        stops_case("one batch an epoch", 3, 3, 6, 6, [1, 2, 4]),
    ),
    "d": (
        ends_case("documents that fill their rows", [[0, 1, 2, 5], [3, 4, 1, 5]], 3),
        ends_case("one document, and filling", [[2, 3, 4, 5]], 8),
        ends_case("end tokens inside, one after another", [[0, 5, 5, 3, 5], [4, 5], [1, 5, 2, 5, 5]], 6),
        ends_case("one that was cut, and has no end", [[0, 1, 2, 3], [3, 4, 5]], 5),
        ends_case("one that begins with an end token", [[5, 0, 1, 5], [5, 5]], 4),
    ),
}
STAGES = {letter: Check(f"03.hunt.{letter}", (), cases, ()) for letter, cases in CASES.items()}
