"""Check of 08.simulate. Oracles: the bubble of the paper, and networkx's Bellman-Ford: an action begins when the longest chain of actions
and transfers before it is done, which is a shortest path with a minus.

Tolerances. Seconds are whole numbers and binary fractions, so their sums are exact; they are compared as words of six digits.
"""

import random
from collections.abc import Callable, Sequence
from itertools import zip_longest

from shared.course.checking import SHAPE, Case, Check
from shared.course.comparing import Said
from shared.parallel.pipeline.schedules import Action, bubble_fraction, make_schedule

from .lists import CONTRACT, word

NETWORKX = "networkx: the longest chain of actions before each"
PAPER = "Narayanan et al. 2021, section 2.2: the bubble is (ranks - 1) / (chunks * microbatches) of the time computed"


def parse(*lists: str) -> list[list[Action]]:
    """Schedules as the drawings write them: F0' is F0 of chunk 1."""
    return [[Action(text[0], int(text[1:].strip("'")), text.count("'")) for text in own.split()] for own in lists]


def taking(*by_stage: float, **by_kind: float) -> Callable[[Action, int], float]:
    """How long actions take: by their kind, times a factor of their stage."""

    def seconds(action: Action, stage: int) -> float:
        return by_kind[action.kind] * (by_stage[stage] if by_stage else 1)

    each = ", ".join(f"{kind} {number:g} s" for kind, number in by_kind.items())
    seconds.__doc__ = each + (f", times {list(by_stage)} by stage" if by_stage else "")
    return seconds


def of_each(action: Action, stage: int) -> float:
    """F of micro-batch i takes i + 1 s, its B as long as both"""
    return (action.microbatch + 1) * (2 if action.kind == "B" else 1)


PLAIN = taking(F=1, B=2)
SPLIT = taking(F=1, I=1, W=1, B=2)


def number(value) -> str:
    return f"{value:g}" if isinstance(value, int | float) else f"{type(value).__name__} {value!r}"


def spans(function: Callable, schedule, **given) -> dict:
    """For each rank: each action with the seconds at which it begins and ends."""
    rows = function(schedule=schedule, **given)
    wrong = next((f"a {type(part).__name__}, not a list" for part in [rows, *(rows or ())] if type(part) is not list), None)
    if wrong:
        return {"rows": Said(wrong)}
    return {f"rank {rank}": in_words(row, schedule[rank] if rank < len(schedule) else ()) for rank, row in enumerate(rows)}


def in_words(row: list, actions: Sequence[Action]) -> list[str]:
    names = [f"{word(action)} " for action in actions]
    return [name + written(span) for name, span in zip_longest(names[: len(row)], row, fillvalue="")]


def written(span) -> str:
    if type(span) is not tuple or len(span) != 2:
        return f"{type(span).__name__} {span!r}"
    return f"{number(span[0])} to {number(span[1])}"


def of_what(function: Callable, **given) -> dict:
    """What is in what."""
    rows = function(**given)
    first = rows[0][0] if type(rows) is list and rows and type(rows[0]) is list and rows[0] else None
    if first is None:
        return {"rows": Said(f"a {type(rows).__name__} of {', '.join(sorted({type(row).__name__ for row in rows}))}")}
    return {"rows": Said(f"lists of {[len(row) for row in rows]}: {type(first).__name__} of {len(first)}")}


def tell(*rows: str) -> Callable:
    """Expected: by rank, "F0 0 to 1; B0 1 to 3"."""
    return lambda **_: {f"rank {rank}": row.split("; ") for rank, row in enumerate(rows)}


def step(function: Callable, schedule, chunks: int, seconds: Callable, transfer: float = 0.0) -> dict:
    """Of a long step: how long it is, and what the first rank waits."""
    rows = function(schedule, chunks, seconds, transfer)
    busy = sum(end - begin for begin, end in rows[0])
    whole = max(row[-1][1] for row in rows)
    return {"actions": sum(map(len, rows)), "seconds": float(whole), "bubble of rank 0": float((whole - busy) / busy)}


def by_the_paper(ranks: int, microbatches: int, chunks: int = 1) -> Callable:
    def told(**_) -> dict:
        bubble, computed = bubble_fraction(ranks, microbatches, chunks), 3.0 * chunks * microbatches
        return {"actions": 2 * ranks * chunks * microbatches, "seconds": computed * (1 + bubble), "bubble of rank 0": bubble}

    return told


def by_networkx(schedule, chunks: int, seconds: Callable, transfer: float) -> dict:
    import networkx

    ranks, graph = len(schedule), networkx.DiGraph()
    known = {(action, rank) for rank, own in enumerate(schedule) for action in own}
    for rank, own in enumerate(schedule):
        for before, action in zip([None, *own], own, strict=False):
            graph.add_edge("start", (action, rank), weight=0.0)
            if before is not None:
                graph.add_edge((before, rank), (action, rank), weight=-seconds(before, before.chunk * ranks + rank))
            step = 1 if action.kind == "F" else -1
            chunk, other = divmod(action.chunk * ranks + rank + step, ranks)
            for kind in {"F": "F", "B": "BI", "I": "BI", "W": ""}[action.kind]:
                if (after := (Action(kind, action.microbatch, chunk), other)) in known:
                    graph.add_edge((action, rank), after, weight=-seconds(action, action.chunk * ranks + rank) - transfer)
    paths = networkx.single_source_bellman_ford_path_length(graph, "start")
    begins = [[-paths[action, rank] + 0.0 for action in own] for rank, own in enumerate(schedule)]
    rows = [
        [(begin, begin + seconds(action, action.chunk * ranks + rank)) for action, begin in zip(own, begins[rank], strict=True)]
        for rank, own in enumerate(schedule)
    ]
    return spans(lambda schedule: rows, schedule)


def uneven(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Callable:
    """A schedule with stages, kinds and micro-batches of random lengths, in eighths of a second."""
    draw = random.Random(f"{name} {ranks}")
    schedule = make_schedule(name, ranks, microbatches, chunks)
    lengths = {(action, rank): draw.randrange(1, 24) / 8 for rank, own in enumerate(schedule) for action in own}

    def seconds(action: Action, stage: int) -> float:
        """random eighths of a second"""
        return lengths[action, stage % ranks]

    return lambda: {"schedule": [[*own] for own in schedule], "chunks": chunks, "seconds": seconds, "transfer": 0.375}


def case(rung, title, schedule, expected, seconds=PLAIN, transfer=0.0, chunks=1, source=CONTRACT, observe=spans):
    def given() -> dict:
        fresh = type(schedule)(type(own)(own) for own in schedule)
        return {"schedule": fresh, "chunks": chunks, "seconds": seconds, "transfer": transfer}

    return Case(rung, title, given, expected, source, observe, rtol=1e-12)


ONE = parse("F0 B0", "F0 B0")
CHUNKS = parse("F0 F0' B0' B0", "F0 F0' B0' B0")
MIXED = parse("F0 F1 I0 W0 I1 W1", "F0 B0 F1 B1")

CHECK = Check(
    exercise="08.simulate",
    outputs=("rows",),
    spoilt=("rows",),
    seconds=10,
    cases=[
        case(SHAPE, "two ranks, one micro-batch", ONE, lambda **_: {"rows": Said("lists of [2, 2]: tuple of 2")}, observe=of_what),
        case("worked example", "one micro-batch on two ranks", ONE, tell("F0 0 to 1; B0 4 to 6", "F0 1 to 2; B0 2 to 4")),
        case(
            "worked example", "the same, and half a second from rank to rank", ONE,
            tell("F0 0 to 1; B0 5 to 7", "F0 1.5 to 2.5; B0 2.5 to 4.5"), transfer=0.5,
        ),
        case(
            "worked example", "1F1B of three micro-batches on two ranks", make_schedule("1f1b", 2, 3),
            tell("F0 0 to 1; F1 1 to 2; B0 4 to 6; F2 6 to 7; B1 7 to 9; B2 10 to 12",
                 "F0 1 to 2; B0 2 to 4; F1 4 to 5; B1 5 to 7; F2 7 to 8; B2 8 to 10"),
        ),
        case(
            "worked example", "a second stage that takes twice as long", make_schedule("gpipe", 2, 2),
            tell("F0 0 to 1; F1 1 to 2; B0 9 to 11; B1 13 to 15", "F0 1 to 3; F1 3 to 5; B0 5 to 9; B1 9 to 13"), taking(1, 2, F=1, B=2),
        ),
        case(
            "worked example", "backward passes in two parts", parse("F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"),
            tell("F0 0 to 1; F1 1 to 2; I0 3 to 4; W0 4 to 5; I1 5 to 6; W1 6 to 7",
                 "F0 1 to 2; I0 2 to 3; F1 3 to 4; I1 4 to 5; W0 5 to 6; W1 6 to 7"),
            SPLIT,
        ),
        case(
            "worked example", "two chunks on each of two ranks", CHUNKS,
            tell("F0 0 to 1; F0' 2 to 3; B0' 6 to 8; B0 10 to 12", "F0 1 to 2; F0' 3 to 4; B0' 4 to 6; B0 8 to 10"), chunks=2,
        ),
        case(
            "property", "two chunks, and four stages of different lengths", CHUNKS,
            tell("F0 0 to 1; F0' 3 to 6; B0' 18 to 24; B0 28 to 30", "F0 1 to 3; F0' 6 to 10; B0' 10 to 18; B0 24 to 28"),
            taking(1, 2, 3, 4, F=1, B=2), chunks=2,
        ),
        case(
            "property", "a weight gradient that nobody waits for, and one that takes long", parse("F0 I0 W0", "F0 I0 W0"),
            tell("F0 0 to 1; I0 3 to 4; W0 4 to 14", "F0 1 to 2; I0 2 to 3; W0 3 to 13"), taking(F=1, I=1, W=10),
        ),
        case(
            "property", "a rank that does B before one that does I and W", MIXED,
            tell("F0 0 to 1; F1 1 to 2; I0 4 to 5; W0 5 to 6; I1 7 to 8; W1 8 to 9", "F0 1 to 2; B0 2 to 4; F1 4 to 5; B1 5 to 7"), SPLIT,
        ),
        case(
            "property", "a rank that does I and W before one that does B", parse("F0 B0", "F0 I0 W0"),
            tell("F0 0 to 1; B0 3 to 5", "F0 1 to 2; I0 2 to 3; W0 3 to 4"), SPLIT,
        ),
        case(
            "property", "micro-batches in another order", parse("F1 F0 B1 B0", "F1 F0 B1 B0"),
            tell("F1 0 to 2; F0 2 to 3; B1 9 to 13; B0 13 to 15", "F1 2 to 4; F0 4 to 5; B1 5 to 9; B0 9 to 11"), of_each,
        ),
        case(
            "property", "a transfer that lasts longer than the work", make_schedule("gpipe", 2, 2),
            tell("F0 0 to 1; F1 1 to 2; B0 15 to 17; B1 17 to 19", "F0 6 to 7; F1 7 to 8; B0 8 to 10; B1 10 to 12"),
            transfer=5.0,
        ),
        case("property", "one rank", parse("F0 F1 B0 B1"), tell("F0 0 to 1; F1 1 to 2; B0 2 to 4; B1 4 to 6"), transfer=3.0),
        case(
            "property", "one rank with two chunks, which sends nothing", parse("F0 F0' B0' B0"),
            tell("F0 0 to 1; F0' 1 to 2; B0' 2 to 4; B0 4 to 6"), transfer=3.0, chunks=2,
        ),
        case(
            "property", "forward passes that take no time", parse("F0 F1 B0 B1", "F0 F1 B0 B1"),
            tell("F0 0 to 0; F1 0 to 0; B0 2 to 4; B1 4 to 6", "F0 0 to 0; F1 0 to 0; B0 0 to 2; B1 2 to 4"), taking(F=0, B=2),
        ),
        case(
            "property", "lists that are tuples", tuple(map(tuple, make_schedule("1f1b", 2, 2))),
            tell("F0 0 to 1; F1 1 to 2; B0 4 to 6; B1 7 to 9", "F0 1 to 2; B0 2 to 4; F1 4 to 5; B1 5 to 7"),
        ),
        case(
            "property", "three ranks, of which the last one begins late", make_schedule("gpipe", 3, 1),
            tell("F0 0 to 1; B0 9 to 11", "F0 1.5 to 2.5; B0 6.5 to 8.5", "F0 3 to 4; B0 4 to 6"), transfer=0.5,
        ),
        case("oracle", "GPipe on 4 ranks", make_schedule("gpipe", 4, 8), by_the_paper(4, 8), source=PAPER, observe=step),
        case("oracle", "1F1B on 4 ranks", make_schedule("1f1b", 4, 8), by_the_paper(4, 8), source=PAPER, observe=step),
        case(
            "oracle", "3 chunks on 4 ranks", make_schedule("interleaved", 4, 8, 3), by_the_paper(4, 8, 3), chunks=3,
            source=PAPER, observe=step,
        ),
        Case("oracle", "1F1B with uneven work", uneven("1f1b", 4, 6), by_networkx, NETWORKX, spans),
        Case("oracle", "zero bubble with uneven work", uneven("zero_bubble", 3, 5), by_networkx, NETWORKX, spans),
        Case("oracle", "interleaved with uneven work", uneven("interleaved", 3, 6, 2), by_networkx, NETWORKX, spans),
        case(
            "budget", "four thousand actions on each rank, too many for a call inside a call", make_schedule("gpipe", 4, 2000),
            by_the_paper(4, 2000), source=PAPER, observe=step,
        ),
        case("budget", "eight thousand actions", make_schedule("1f1b", 8, 512), by_the_paper(8, 512), source=PAPER, observe=step),
    ],
)  # fmt: skip
