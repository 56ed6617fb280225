"""Check of 08.balance_stages. Oracles: all splits, tried one by one, where there are few; torch's tensor_split for equal blocks; and for
many blocks the cheapest most expensive stage, found by trying bounds. Costs are whole numbers and binary fractions: sums are exact."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from shared.course.checking import SHAPE, Case, Check
from shared.course.comparing import Said

from .lists import CONTRACT, given, refused

BRUTE = "every split, compared with every other as the contract says"
BOUNDS = "bisection: the lowest bound under which consecutive blocks fit on so many stages"
SPLIT = "torch.Tensor.tensor_split of the blocks"


def word(stage) -> str:
    if type(stage) is not range or stage.step != 1:
        return f"{type(stage).__name__} {stage!r}"
    return f"{stage.start} to {stage.stop - 1}" if len(stage) else f"none of {stage!r}"


def ranges(function: Callable, **arguments) -> dict:
    """The blocks of each stage, the first and the last one."""
    found = function(**arguments)
    return {"stages": [*map(word, found)] if type(found) is list else Said(f"a {type(found).__name__}, not a list")}


def of_what(function: Callable, **arguments) -> dict:
    found = function(**arguments)
    kinds = ", ".join(sorted({type(stage).__name__ for stage in found}))
    return {"stages": Said(f"a {type(found).__name__} of {len(found)} {kinds}")}


def tell(*stages: str) -> Callable:
    return lambda **_: {"stages": list(stages)}


def costs_of(split: Sequence[range], blocks: Sequence[float], first: float, last: float) -> list[float]:
    """The costs of the stages."""
    ends = [first, *[0] * (len(split) - 1)]
    ends[-1] += last
    return [more + sum(blocks[number] for number in stage) for more, stage in zip(ends, split, strict=True)]


def by_brute_force(blocks, stages, first=0, last=0) -> dict:
    best = None
    for cuts in combinations(range(1, len(blocks)), stages - 1):
        edges = [0, *cuts, len(blocks)]
        split = [range(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
        key = sorted(costs_of(split, blocks, first, last))[::-1], [-len(stage) for stage in split]
        if best is None or key < best[0]:
            best = key, split
    return {"stages": [*map(word, best[1])]}


def evenly(blocks, stages, **_) -> dict:
    parts = torch.arange(len(blocks)).tensor_split(stages)
    return {"stages": [f"{int(part[0])} to {int(part[-1])}" for part in parts]}


def random_problems(seed: int, count: int, most: int) -> list[dict]:
    draw = random.Random(seed)
    problems = []
    for _ in range(count):
        blocks = [draw.randrange(most + 1) for _ in range(draw.randrange(1, 10))]
        stages, ends = draw.randrange(1, min(len(blocks), 5) + 1), draw.choice([1, most, 2 * most])
        problems.append({"blocks": blocks, "stages": stages, "first": draw.randrange(ends), "last": draw.randrange(ends)})
    return problems


def all_of(function: Callable, problems) -> dict:
    """The answers to many small problems."""
    return {f"{problem}": ranges(function, **problem)["stages"] for problem in problems}


def all_by_brute_force(problems) -> dict:
    return {f"{problem}": by_brute_force(**problem)["stages"] for problem in problems}


def dearest(function: Callable, blocks, stages, first, last) -> dict:
    """What the most expensive stage costs, and whether all blocks are there once."""
    split = function(blocks, stages, first, last)
    whole = [number for stage in split for number in stage] == [*range(len(blocks))] and len(split) == stages
    return {"every block once, in order": whole, "most expensive stage": max(costs_of(split, blocks, first, last))}


def by_bounds(blocks, stages, first, last) -> dict:
    def fits(bound: int) -> bool:
        """Whether stages that are filled as far as the bound permits, from the last block back, are enough."""
        held, used = last + blocks[-1], 1
        for cost in reversed(blocks[:-1]):
            if held > bound:
                return False
            held, used = (cost, used + 1) if held + cost > bound else (held + cost, used)
        if held + first > bound:  # the first block alone with what is first, behind it what was with it
            held, used = blocks[0] + (last if len(blocks) == 1 else 0), used + (len(blocks) > 1)
        return held + first <= bound and used <= stages

    low, high = 0, sum(blocks) + first + last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return {"every block once, in order": True, "most expensive stage": low}


def case(rung, title, blocks, stages, expected, first=0, last=0, source=CONTRACT, observe=ranges):
    arguments = lambda: {"blocks": type(blocks)(blocks), "stages": stages, "first": first, "last": last}  # noqa: E731
    return Case(rung, title, arguments, expected, source, of_what if rung == SHAPE else observe)


MANY = [random.Random(7).randrange(20, 60) for _ in range(100)]

CHECK = Check(
    exercise="08.balance_stages",
    outputs=("stages",),
    spoilt=("stages",),
    seconds=20,
    cases=[
        case(SHAPE, "seven equal blocks on three stages", [1] * 7, 3, lambda **_: {"stages": Said("a list of 3 range")}),
        case("worked example", "seven equal blocks on three stages", [1] * 7, 3, tell("0 to 2", "3 to 4", "5 to 6")),
        case("worked example", "six blocks, and a head that costs as much as two", [1] * 6, 2, tell("0 to 3", "4 to 5"), last=2),
        case("worked example", "six blocks, and an embedding that costs as much as two", [2] * 6, 2, tell("0 to 1", "2 to 5"), first=4),
        case("worked example", "two dear blocks at the ends, on three stages", [4, 1, 1, 1, 1, 4], 3, tell("0 to 0", "1 to 4", "5 to 5")),
        case("worked example", "one dear block in the middle", [1, 1, 6, 1, 1, 1], 3, tell("0 to 1", "2 to 2", "3 to 5")),
        case("worked example", "the stages after the most expensive one", [5, 1, 1, 1, 1], 3, tell("0 to 0", "1 to 2", "3 to 4")),
        case("worked example", "the stages before the most expensive one", [1, 1, 1, 1, 5], 3, tell("0 to 1", "2 to 3", "4 to 4")),
        case("worked example", "a most expensive stage of 5, not of 6 with cheaper others",
             [3, 2, 5, 1], 3, tell("0 to 1", "2 to 2", "3 to 3")),
        case("property", "a tie, which the first stage wins with more blocks", [1, 2, 1, 2, 1], 2, tell("0 to 2", "3 to 4")),
        case("property", "a tie, which the second stage wins", [5, 1, 2, 1, 2, 1], 3, tell("0 to 0", "1 to 3", "4 to 5")),
        case("property", "a tie, in which more blocks cost less", [0, 0, 3, 0, 0], 2, tell("0 to 3", "4 to 4")),
        case("property", "blocks that cost nothing", [0] * 5, 3, tell("0 to 2", "3 to 3", "4 to 4")),
        case("property", "one stage", [2, 3, 5], 1, tell("0 to 2"), first=1, last=1),
        case("property", "a block for each stage", [3, 1, 2], 3, tell("0 to 0", "1 to 1", "2 to 2"), first=9),
        case("property", "one block", [3], 1, tell("0 to 0")),
        case("property", "an embedding that is dearer than all blocks", [1] * 5, 2, tell("0 to 0", "1 to 4"), first=100),
        case("property", "a head that is dearer than all blocks", [1] * 6, 3, tell("0 to 2", "3 to 4", "5 to 5"), last=100),
        case("property", "an embedding and a head", [2] * 6, 3, tell("0 to 0", "1 to 3", "4 to 5"), first=4, last=2),
        case("property", "after the most expensive stage, 5 and 5, not 6 with cheaper others", [9, 3, 2, 5, 1], 4,
             tell("0 to 0", "1 to 2", "3 to 3", "4 to 4")),
        case("property", "costs that are binary fractions, in a tuple", (0.75, 0.75, 0.25, 0.25, 0.25, 0.25), 2, tell("0 to 1", "2 to 5")),
        case("property", "ends that are binary fractions", [0.5] * 4, 2, tell("0 to 1", "2 to 3"), first=0.5, last=0.25),
        case("property", "two blocks for three stages", [1, 1], 3, refused),
        case("property", "no blocks for one stage", [], 1, refused),
        Case("oracle", "three hundred small problems", given(problems=random_problems(1, 300, 9)), all_by_brute_force, BRUTE, all_of),
        Case("oracle", "a hundred with many ties", given(problems=random_problems(2, 100, 2)), all_by_brute_force, BRUTE, all_of),
        case("oracle", "23 equal blocks on 8 stages", [3] * 23, 8, evenly, source=SPLIT),
        case("budget", "a hundred blocks on 16 stages", MANY, 16, by_bounds, 90, 170, BOUNDS, dearest),
    ],
)  # fmt: skip
