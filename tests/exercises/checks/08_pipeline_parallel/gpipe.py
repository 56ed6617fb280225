"""Check of 08.gpipe. Oracle: PyTorch's ScheduleGPipe. Lists are compared exactly."""

from shared.course.checking import SHAPE, Check

from .lists import PYTORCH, as_a_whole, case, every_rank, many, of_pytorch, tell, twice

PAIRS = ((1, 3), (2, 1), (3, 5), (4, 4), (5, 2), (2, 11), (9, 10))
SIZES = [{"ranks": ranks, "microbatches": microbatches} for ranks, microbatches in PAIRS]


def of(rank: int, ranks: int, microbatches: int) -> dict:
    return {"rank": rank, "ranks": ranks, "microbatches": microbatches}


def whole(ranks: int, microbatches: int) -> dict:
    """Every rank waits ranks - 1 slots on the way forward, and as many on the way back."""
    return {"it can run": "yes", "slots": 2.0 * (microbatches + ranks - 1), "activations kept by rank": [microbatches] * ranks}


CHECK = Check(
    exercise="08.gpipe",
    outputs=("actions",),
    spoilt=("actions",),
    seconds=10,
    cases=[
        case(SHAPE, "rank 1 of 2 with 3 micro-batches", of(1, 2, 3), many(6)),
        case("worked example", "rank 1 of 2 with 3 micro-batches", of(1, 2, 3), tell("F0 F1 F2 B0 B1 B2")),
        case("worked example", "rank 0 of 3 with 2 micro-batches", of(0, 3, 2), tell("F0 F1 B0 B1")),
        case("worked example", "the last rank of 3 with 4 micro-batches", of(2, 3, 4), tell("F0 F1 F2 F3 B0 B1 B2 B3")),
        case("property", "one micro-batch", of(1, 4, 1), tell("F0 B0")),
        case("property", "one rank", of(0, 1, 3), tell("F0 F1 F2 B0 B1 B2")),
        case("property", "more ranks than micro-batches", of(4, 6, 2), tell("F0 F1 B0 B1")),
        case("property", "a second call", of(0, 3, 2), tell("F0 F1 B0 B1"), observe=twice),
        case("property", "the lists of 4 ranks together", {"ranks": 4, "microbatches": 6}, whole, observe=as_a_whole),
        case("oracle", "seven sizes, every rank", {"sizes": SIZES}, of_pytorch("ScheduleGPipe"), PYTORCH, every_rank),
    ],
)
