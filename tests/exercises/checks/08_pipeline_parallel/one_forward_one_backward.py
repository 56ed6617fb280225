"""Check of 08.one_forward_one_backward. Oracle: PyTorch's Schedule1F1B, which wants as many micro-batches as ranks at least, and counts the
last rank's forward passes from 1 (`by_torch` mends that). Lists are compared exactly."""

from shared.course.checking import SHAPE, Check

from .lists import DRAWING, PYTORCH, as_a_whole, case, every_rank, many, of_pytorch, tell, twice

PAIRS = ((1, 4), (2, 2), (2, 7), (3, 8), (4, 4), (6, 13), (10, 12))
SIZES = [{"ranks": ranks, "microbatches": microbatches} for ranks, microbatches in PAIRS]


def of(rank: int, ranks: int, microbatches: int) -> dict:
    return {"rank": rank, "ranks": ranks, "microbatches": microbatches}


def whole(ranks: int, microbatches: int) -> dict:
    """As long as GPipe's, and within the bound."""
    kept = [min(microbatches, ranks - rank) for rank in range(ranks)]
    return {"it can run": "yes", "slots": 2.0 * (microbatches + ranks - 1), "activations kept by rank": kept}


def long(rank: int, ranks: int, microbatches: int) -> dict:
    """What one rank's list holds, counted, and its two ends."""
    return {"actions": 2 * microbatches, "first": "F0 F1 F2 B0 F3", "last": f"B{microbatches - 3} B{microbatches - 2} B{microbatches - 1}"}


def ends(function, **given) -> dict:
    actions = [str(action) for action in function(**given)]
    return {"actions": len(actions), "first": " ".join(actions[:5]), "last": " ".join(actions[-3:])}


CHECK = Check(
    exercise="08.one_forward_one_backward",
    outputs=("actions",),
    spoilt=("actions",),
    seconds=10,
    cases=[
        case(SHAPE, "rank 0 of 2 with 3 micro-batches", of(0, 2, 3), many(6)),
        case("worked example", "rank 0 of 3 with 5 micro-batches", of(0, 3, 5), tell("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"), DRAWING),
        case("worked example", "rank 1 of 3 with 5 micro-batches", of(1, 3, 5), tell("F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"), DRAWING),
        case("worked example", "the last rank of 3 with 5 micro-batches", of(2, 3, 5), tell("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"), DRAWING),
        case("worked example", "rank 0 of 2 with 3 micro-batches", of(0, 2, 3), tell("F0 F1 B0 F2 B1 B2")),
        case("property", "rank 1 of 5 with 6 micro-batches", of(1, 5, 6), tell("F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5")),
        case("property", "one rank", of(0, 1, 3), tell("F0 B0 F1 B1 F2 B2")),
        case("property", "one micro-batch", of(0, 4, 1), tell("F0 B0")),
        case("property", "as many micro-batches as ranks", of(0, 4, 4), tell("F0 F1 F2 F3 B0 B1 B2 B3")),
        case("property", "one micro-batch fewer than ranks", of(0, 4, 3), tell("F0 F1 F2 B0 B1 B2")),
        case("property", "far fewer micro-batches than ranks, on a rank that may keep all", of(1, 6, 2), tell("F0 F1 B0 B1")),
        case("property", "fewer micro-batches than ranks, on a rank that may not keep all", of(3, 5, 4), tell("F0 F1 B0 F2 B1 F3 B2 B3")),
        case("property", "a second call", of(1, 3, 3), tell("F0 F1 B0 F2 B1 B2"), observe=twice),
        case("property", "the lists of 4 ranks together", {"ranks": 4, "microbatches": 6}, whole, observe=as_a_whole),
        case("property", "the lists of 5 ranks with 3 micro-batches", {"ranks": 5, "microbatches": 3}, whole, observe=as_a_whole),
        case("oracle", "seven sizes, every rank", {"sizes": SIZES}, of_pytorch("Schedule1F1B"), PYTORCH, every_rank),
        case("budget", "five thousand micro-batches", of(1, 4, 5000), long, observe=ends),
    ],
)
