"""Check of 06.unshard_unit. Oracle: torch.cat of the ranks' shards, rounded by torch.

Ranks are threads. Views of the whole are made before its storage is let go, as a unit's weights are. Rank i holds 10^i times 1, 2, 3, ...

Tolerances. Numbers are copied and rounded, never computed with: exact.
"""

import torch

from shared.course.checking import Case, Check

from .watched import CONTRACT, begun, finished, let_go, over_ranks, overlaps, shown

DIGITS = "arithmetic: rank i's shard is 10^i times [1, 2, 3, ...], and they lie one after the other"


def shards(ranks: int, length: int, dtype=torch.float64, whole=torch.float64, **more):
    return lambda: {"shards": [(10.0**rank * torch.arange(1.0, length + 1)).to(dtype) for rank in range(ranks)], "whole": whole} | more


def random(ranks: int, length: int, dtype, whole):
    def given():
        generators = [torch.Generator().manual_seed(7 + rank) for rank in range(ranks)]
        return {"shards": [torch.randn(length, generator=each, dtype=torch.float64).to(dtype) for each in generators], "whole": whole}

    return given


def views_of(tensor):
    """All of it, its first 2 numbers, and the rest, by name."""
    return {"whole": tensor, "whole[:2]": tensor[:2], "whole[2:]": tensor[2:]}


def gathered(function, shards, whole):
    """What views of the whole show, twice: once gathered, let go, and gathered anew from other shards."""

    def work(world):
        unit = torch.zeros(world.size * len(shards[0]), dtype=whole)
        views, seen = views_of(unit), {}
        for time, times in (("", 1), (" the second time", 3)):
            unit.untyped_storage().resize_(0)
            shard = times * shards[world.rank]
            before = shard.clone()
            problem = finished(function(unit, shard, world))
            seen |= {name + time: shown(view) for name, view in views.items()}
            if not torch.equal(shard, before):
                problem["changed its argument shard"] = True
            if problem:
                return problem
        return seen

    return over_ranks(work, len(shards))


def concatenated(shards, whole):
    once, again = views_of(torch.cat(shards).to(whole)), views_of(torch.cat([3 * shard for shard in shards]).to(whole))
    result = once | {f"{name} the second time": view for name, view in again.items()}
    return {f"rank {rank}": result for rank in range(len(shards))}


def used(function, shards, whole):
    """What was begun, before anybody waits for it, and how much memory the whole has."""

    def work(world):
        unit, parts, all_gather = let_go(world.size * len(shards[0]), whole), [], world.all_gather
        world.all_gather = lambda into, part, asynchronous=False: parts.append((into, part)) or all_gather(into, part, asynchronous)
        operation = function(unit, shards[world.rank], world)
        told = begun(world, "all_gather")
        problem = finished(operation)
        wrong_place = any(overlaps(part, into, world.rank) for into, part in parts)
        return told | {"bytes of the whole": unit.untyped_storage().nbytes(), "a part lies at another rank's place": wrong_place} | problem

    return over_ranks(work, len(shards))


def one_gathering(shards, whole):
    bytes = len(shards) * len(shards[0]) * whole.itemsize
    told = {"operations": ["all_gather"] if len(shards) > 1 else [], "bytes": [bytes], "waited for before it was returned": False}
    told |= {"bytes of the whole": bytes, "a part lies at another rank's place": False}
    return {f"rank {rank}": told for rank in range(len(shards))}


def case(rung: str, title: str, given, source: str = "torch.cat(shards)", expected=concatenated, observe=gathered) -> Case:
    return Case(rung, title, given, expected, source, observe, rtol=0.0)


def budget(title: str, given) -> Case:
    return case("budget", title, given, CONTRACT, one_gathering, used)


CHECK = Check(
    exercise="06.unshard_unit",
    outputs=("work",),
    spoilt=("numbers of whole when done",),
    cases=[
        case("shape and dtype", "two ranks, [3] each", shards(2, 3), CONTRACT),
        case("worked example", "one rank", shards(1, 3), DIGITS),
        case("worked example", "three ranks, [5] each", shards(3, 5), DIGITS),
        case("property", "bfloat16 from float32", shards(3, 5, torch.float32, torch.bfloat16), DIGITS),
        case("oracle", "random numbers, float16 from float32", random(2, 11, torch.float32, torch.float16), "torch.cat(shards).half()"),
        case("two ranks", "random numbers", random(2, 13, torch.float64, torch.float64)),
        budget("one gathering, under way when it is returned", shards(2, 7, torch.float32, torch.float32)),
        budget("half the bytes where the whole is half as wide", shards(3, 7, torch.float32, torch.bfloat16)),
    ],
)  # fmt: skip
