"""Check of 08.interleaved. Oracle: PyTorch's ScheduleInterleaved1F1B. Lists are compared exactly."""

from shared.course.checking import SHAPE, Check

from .lists import DRAWING, PYTORCH, as_a_whole, case, every_rank, many, of_pytorch, refused, tell, twice

SIZES = [
    {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    for ranks, microbatches, chunks in ((2, 6, 3), (3, 3, 2), (3, 9, 2), (4, 8, 3), (4, 12, 1), (2, 2, 4), (5, 10, 2))
]


def of(rank: int, ranks: int, microbatches: int, chunks: int) -> dict:
    return {"rank": rank, "ranks": ranks, "microbatches": microbatches, "chunks": chunks}


def whole(ranks: int, microbatches: int, chunks: int) -> dict:
    """A pass through one chunk takes a slot. The bubble is that of the paper's section 2.2.2: ranks - 1 slots forward, as many backward."""
    kept = [(chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1 for rank in range(ranks)]
    slots = 2.0 * (chunks * microbatches + ranks - 1)
    return {"it can run": "yes", "slots": slots, "activations kept by rank": [min(most, chunks * microbatches) for most in kept]}


FOUR = {"ranks": 2, "microbatches": 4, "chunks": 2}
PAPER = "Narayanan et al. 2021, section 2.2.2: the bubble is (ranks - 1) / (chunks * microbatches) of the time computed"

CHECK = Check(
    exercise="08.interleaved",
    outputs=("actions",),
    spoilt=("actions",),
    seconds=10,
    cases=[
        case(SHAPE, "rank 1 of 2 with 2 micro-batches and 2 chunks", of(1, 2, 2, 2), many(8)),
        case("worked example", "rank 1 of 2 with 2 micro-batches and 2 chunks", of(1, 2, 2, 2), tell("F0 F1 F0' B0' F1' B1' B0 B1")),
        case(
            "worked example", "rank 0 of 2 with 4 micro-batches and 2 chunks", {"rank": 0} | FOUR,
            tell("F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"), DRAWING,
        ),
        case(
            "worked example", "rank 1 of 2 with 4 micro-batches and 2 chunks", {"rank": 1} | FOUR,
            tell("F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3"), DRAWING,
        ),
        case(
            "worked example", "rank 1 of 3 with 6 micro-batches and 2 chunks", of(1, 3, 6, 2),
            tell("F0 F1 F2 F0' F1' F2' B0' F3 B1' F4 B2' F5 B0 F3' B1 F4' B2 F5' B3' B4' B5' B3 B4 B5"),
        ),
        case(
            "worked example", "the last rank of 2 with 2 micro-batches and 3 chunks", of(1, 2, 2, 3),
            tell("F0 F1 F0' F1' F0'' B0'' F1'' B1'' B0' B1' B0 B1"),
        ),
        case("property", "3 micro-batches on 2 ranks", of(0, 2, 3, 2), refused),
        case("property", "2 micro-batches on the last of 4 ranks", of(3, 4, 2, 2), refused),
        case("property", "5 micro-batches on 4 ranks with one chunk", of(1, 4, 5, 1), refused),
        case("property", "one chunk", of(0, 2, 4, 1), tell("F0 F1 F2 B0 F3 B1 B2 B3")),
        case("property", "one chunk, on the last rank", of(2, 3, 3, 1), tell("F0 B0 F1 B1 F2 B2")),
        case("property", "one rank with two chunks", of(0, 1, 2, 2), tell("F0 F0' B0' F1 B0 F1' B1' B1")),
        case("property", "one rank with one chunk", of(0, 1, 2, 1), tell("F0 B0 F1 B1")),
        case(
            "property", "fewer forward passes than the slots before the first backward pass", of(0, 4, 4, 2),
            tell("F0 F1 F2 F3 F0' F1' F2' F3' B0' B1' B2' B3' B0 B1 B2 B3"),
        ),
        case("property", "a second call", of(1, 2, 2, 2), tell("F0 F1 F0' B0' F1' B1' B0 B1"), observe=twice),
        case("property", "the lists of 4 ranks together", {"ranks": 4, "microbatches": 8, "chunks": 3}, whole, PAPER, as_a_whole),
        case("property", "the lists of 5 ranks with 2 chunks", {"ranks": 5, "microbatches": 15, "chunks": 2}, whole, PAPER, as_a_whole),
        case("oracle", "seven sizes, every rank", {"sizes": SIZES}, of_pytorch("ScheduleInterleaved1F1B"), PYTORCH, every_rank),
        case("budget", "a thousand micro-batches", {"ranks": 4, "microbatches": 1000, "chunks": 3}, whole, PAPER, as_a_whole),
    ],
)  # fmt: skip
