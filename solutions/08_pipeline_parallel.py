"""The solutions of chapter 08. The core runs these bodies; each stands here only.

The signatures and docstrings are the contracts in `shared/`; here a docstring says what is particular about this way of doing it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from shared.course.errors import SettingError, nearest_multiples
from shared.parallel.pipeline.schedules import Action, Schedule

# Schedules


def gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Every rank has the same list: what makes them wait for each other is not written in it."""
    return [Action(kind, microbatch) for kind in ("F", "B") for microbatch in range(microbatches)]


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Kept are as many micro-batches as stages from this one on. So the rank warms up with one forward pass fewer, and from then on each
    forward pass reaches the bound, and the backward pass behind it frees a place."""
    warmup = min(microbatches, ranks - rank - 1)
    actions = [Action("F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(warmup, microbatches):
        actions += [Action("F", microbatch), Action("B", microbatch - warmup)]
    return actions + [Action("B", microbatch) for microbatch in range(microbatches - warmup, microbatches)]


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """The two orders first, then how far the forward passes are ahead. The last rank does chunks - 1 rounds of its group before the pass
    whose gradient it can compute itself. Each rank before it begins a slot earlier and gets its first gradient a slot later: two more."""
    if microbatches % ranks:
        raise SettingError(
            f"The interleaved schedule takes micro-batches in groups of {ranks}, as many as there are ranks, and a step has "
            f"{microbatches}: give {nearest_multiples(microbatches, ranks)} micro-batches, or schedule 1f1b."
        )
    groups = [range(start, start + ranks) for start in range(0, microbatches, ranks)]
    forward = [Action("F", microbatch, chunk) for group in groups for chunk in range(chunks) for microbatch in group]
    backward = [Action("B", microbatch, chunk) for group in groups for chunk in reversed(range(chunks)) for microbatch in group]
    warmup = min(len(forward), (chunks - 1) * ranks + 2 * (ranks - rank - 1))
    turns = [action for pair in zip(forward[warmup:], backward, strict=False) for action in pair]
    return [*forward[:warmup], *turns, *backward[len(forward) - warmup :]]


# Simulation


def simulate(
    schedule: Schedule, chunks: int, seconds: Callable[[Action, int], float], transfer: float = 0.0
) -> list[list[tuple[float, float]]]:
    """Round after round, each rank does what it can and stops at the first action whose input nobody has computed yet. Times are only
    added up: a rank may run ahead of the others here, since nothing that they do later changes when its own actions began."""
    ranks, delay = len(schedule), transfer if len(schedule) > 1 else 0.0
    rows: list[list[tuple[float, float]]] = [[] for _ in schedule]
    arrivals: dict[tuple[str, int, int], float] = {}  # of activations (F) and gradients (B): at this stage, of this micro-batch
    moved = True
    while moved:
        moved = False
        for rank, (row, actions) in enumerate(zip(rows, schedule, strict=True)):
            for action in actions[len(row) :]:
                stage, what, way = action.chunk * ranks + rank, "F" if action.kind == "F" else "B", 1 if action.kind == "F" else -1
                outermost = stage == (0 if what == "F" else ranks * chunks - 1)
                arrived = 0.0 if outermost or action.kind == "W" else arrivals.get((what, stage, action.microbatch))
                if arrived is None:
                    break
                begin = max(row[-1][1] if row else 0.0, arrived)
                row.append((begin, begin + seconds(action, stage)))
                if action.kind != "W":
                    arrivals[what, stage + way, action.microbatch] = row[-1][1] + delay
                moved = True
    return rows


# Stages


def balance_stages(blocks: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[range]:
    """The best split of some blocks over some stages contains the best split of what is behind its first stage. So stage by stage, from the
    last one, the best split for every block with which a stage may begin. Splits compare as the pair of costs, the dearest first, and
    lengths with a minus, since more blocks on the earlier stage win a tie."""
    if len(blocks) < stages:
        raise SettingError(f"There are {len(blocks)} blocks for {stages} pipeline stages, each of which needs one: give fewer stages.")
    best = {len(blocks): ((), ())}  # where a stage may begin -> costs and lengths of the stages from it on
    for stage in reversed(range(stages)):
        ends = first * (stage == 0) + last * (stage == stages - 1)
        starts = range(stage, len(blocks) - (stages - stage) + 1) if stage else [0]
        best = {
            start: min(
                (tuple(sorted((ends + sum(blocks[start:stop]), *costs), reverse=True)), (start - stop, *lengths))
                for stop, (costs, lengths) in best.items()
                if stop > start
            )
            for start in starts
        }
    edges = [0]
    for length in best[0][1]:
        edges.append(edges[-1] - length)
    return [range(start, stop) for start, stop in pairwise(edges)]
