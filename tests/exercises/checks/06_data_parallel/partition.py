"""Check of 06.partition. Oracle: the same sharing out by a heap, one number at a time.

Which of several equal ranks gets something is left open, so what is compared is whether each parameter is where it may be, and how many
numbers ranks hold afterwards, by size.
"""

import heapq
import time

from shared.course.checking import Case, Check

CONTRACT = "the contract"
ORACLE = "heapq: the next matrix, and then each single number, goes to the rank that holds the fewest"


def shared(sizes, whole, held):
    return lambda: {"sizes": list(sizes), "whole": [bool(each) for each in whole], "held": list(held)}


def cut(sizes, held):
    return shared(sizes, [False] * len(sizes), held)


def stay(sizes, held):
    return shared(sizes, [True] * len(sizes), held)


def judged(function, sizes, whole, held):
    """What is wrong with a plan, parameter by parameter, and what ranks hold afterwards."""
    ranges = function(sizes, whole, held)
    problems, loads = {}, list(held)
    if type(ranges) is not list or len(ranges) != len(sizes):
        return {"returned no list with one entry for each parameter": True}
    for number, (size, stays, of_ranks) in enumerate(zip(sizes, whole, ranges, strict=True)):
        if problem := problem_of(of_ranks, size, stays, len(held)):
            problems[f"shared out parameter {number} as {of_ranks}: {problem}"] = True
            continue
        loads = [load + stop - start for load, (start, stop) in zip(loads, of_ranks, strict=True)]
    return problems | {"numbers that ranks hold, by size": sorted(loads)}


def problem_of(of_ranks, size, stays, ranks) -> str:
    if type(of_ranks) is not list or len(of_ranks) != ranks:
        return "it is no list with one range for each rank"
    if any(type(each) is not tuple or [type(end) for end in each] != [int, int] for each in of_ranks):
        return "a range is a pair of whole numbers"
    filled = sorted((start, stop) for start, stop in of_ranks if start != stop)
    if any(stop < start or start < 0 or stop > size for start, stop in of_ranks):
        return f"a range begins after its end, or is not within 0 and {size}"
    if [number for start, stop in filled for number in range(start, stop)] != list(range(size)):
        return f"its {size} numbers are not held once each"
    return "it must stay on one rank" if stays and len(filled) > 1 else ""


def by_heap(sizes, whole, held):
    heap = list(held)
    heapq.heapify(heap)
    largest_first = sorted((size for size, stays in zip(sizes, whole, strict=True) if stays), reverse=True)
    for size in [*largest_first, *[1] * sum(size for size, stays in zip(sizes, whole, strict=True) if not stays)]:
        heapq.heapreplace(heap, heap[0] + size)
    return {"numbers that ranks hold, by size": sorted(heap)}


def quickly(function, sizes, whole, held):
    """Whether it takes less than a tenth of a second of this thread's time: one number at a time takes ten times as long."""
    began = time.thread_time()
    result = judged_by_ends(function(sizes, whole, held), held)
    return result | {"less than 0.1 s for these numbers": time.thread_time() - began < 0.1}


def judged_by_ends(ranges, held):
    loads = [load + sum(stop - start for start, stop in column) for load, column in zip(held, zip(*ranges, strict=True), strict=True)]
    return {"numbers that ranks hold, by size": sorted(loads)}


def hold(*loads: int):
    return lambda **given: {"numbers that ranks hold, by size": sorted(loads)}


def in_time(**given):
    loads = [200_000] * 5 + [200_001] * 3
    return {"numbers that ranks hold, by size": loads, "less than 0.1 s for these numbers": True}


def example(title, arguments, expected, source="arithmetic"):
    return Case("worked example", title, arguments, expected, source, judged)


def oracle(title, arguments):
    return Case("oracle", title, arguments, by_heap, ORACLE, judged)


CHECK = Check(
    exercise="06.partition",
    outputs=("ranges",),
    spoilt=("ranges",),
    cases=[
        Case(
            "shape and dtype", "two parameters, three ranks", shared([5, 4], [True, False], [0, 0, 0]),
            lambda **given: {"ranges": [[(0, 5), (0, 0), (0, 0)], [(0, 0), (0, 2), (2, 4)]]}, CONTRACT,
        ),
        example("10 numbers, three ranks", cut([10], [0, 0, 0]), hold(4, 3, 3)),
        example("three parameters, two ranks: 14 numbers", cut([3, 7, 4], [0, 0]), hold(7, 7)),
        example(
            "three matrices that stay whole", stay([4, 3, 5], [0, 0]), hold(7, 5), "arithmetic: 5, then 4 to the other rank, then 3 to it",
        ),
        example("two that stay whole, and 8 numbers that level them out", shared([2, 6, 8], [1, 1, 0], [0, 0]), hold(8, 8)),
        example("ranks that hold 9, 2 and 1 already get 6 more", cut([6], [9, 2, 1]), hold(9, 5, 4), "arithmetic: 2 + 1 + 6 for two ranks"),
        example("... and 20 more", cut([20], [9, 2, 1]), hold(11, 11, 10), "arithmetic: 9 + 2 + 1 + 20 for three ranks"),
        Case("property", "one rank gets everything", shared([3, 5], [1, 0], [0]), hold(8), CONTRACT, judged),
        Case("property", "more ranks than matrices", stay([3, 5], [0] * 4), hold(5, 3, 0, 0), CONTRACT, judged),
        Case("property", "more ranks than numbers", cut([2], [0] * 5), hold(1, 1, 0, 0, 0), CONTRACT, judged),
        Case("property", "nothing to cut is left after a large matrix", stay([50, 2, 2], [0, 0]), hold(50, 4), CONTRACT, judged),
        Case("property", "a rank far above the others gets nothing", shared([50, 7], [1, 0], [0, 0, 0]), hold(50, 4, 3), CONTRACT, judged),
        Case("property", "no parameters", cut([], [3, 1]), hold(3, 1), CONTRACT, judged),
        Case(
            "property", "one is cut over four ranks, one stays within a rank", cut([2, 11, 1], [0, 2, 0, 3]), hold(5, 5, 5, 4),
            CONTRACT, judged,
        ),
        oracle("seven parameters, three ranks", shared([13, 7, 31, 2, 17, 5, 3], [1, 0, 1, 0, 1, 1, 0], [0, 0, 0])),
        oracle("on top of what they hold", shared([13, 7, 31, 2, 17, 5, 3], [1, 0, 1, 0, 1, 1, 0], [40, 3, 19, 0])),
        oracle("equal layers", shared([24, 24, 24, 24, 97, 97, 5] * 3, [1, 1, 1, 1, 1, 1, 0] * 3, [0] * 5)),
        oracle("in rising order", shared([2, 3, 5, 7, 11, 13, 17], [1, 1, 1, 1, 1, 1, 0], [0, 0, 0])),
        Case("budget", "1.6 million numbers, eight ranks", cut([400_000, 1_200_003], [0] * 8), in_time, "1,600,003 / 8", quickly),
    ],
)  # fmt: skip
