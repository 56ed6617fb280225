"""Chapter 08. Pipeline simulation: when each action of a schedule begins and ends, and the pipeline bubble, in which ranks wait.

Each rank does its actions in order; one begins when the rank is free and what it needs has arrived. With stages that all take equally long
and messages that take no time, the bubble of GPipe, 1F1B and interleaved 1F1B is `bubble_fraction`, and that of ZB-H1 is shorter by
(ranks - 1) times what input and weight gradients of a micro-batch would have waited (Qi et al. 2023, table 1).

Left out on purpose: links that several messages share, and a rank whose speed changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shared.course.binding import exercise
from shared.parallel.pipeline.schedules import Action, Schedule
from shared.parallel.pipeline.validate import validate


@dataclass(frozen=True)
class Times:
    """Seconds, of one micro-batch through one chunk. A backward pass B takes as long as its input part and its weight part together.

    stages: how much longer each stage takes than that, as factors, from the first stage to the last; None for 1 each.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    stages: tuple[float, ...] | None = None

    def of(self, action: Action, stage: int) -> float:
        seconds = {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}[action.kind]
        return seconds * (1.0 if self.stages is None else self.stages[stage])


class Span(NamedTuple):
    """An action, and the seconds at which it begins and ends."""

    action: Action
    begin: float
    end: float


@dataclass
class Timeline:
    """What each rank does when. rows: by rank, in order. most: by rank, the most activations at a time (`validate`)."""

    rows: list[list[Span]]
    most: list[int]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(row[-1].end for row in self.rows)

    def bubble(self, rank: int = 0) -> float:
        """The time in which a rank does nothing, as a fraction of that in which it computes."""
        busy = sum(span.end - span.begin for span in self.rows[rank])
        return (self.seconds - busy) / busy


@exercise("08.simulate")
def simulate(
    schedule: Schedule, chunks: int, seconds: Callable[[Action, int], float], transfer: float = 0.0
) -> list[list[tuple[float, float]]]:
    """Simulate a pipeline schedule: when each action begins and ends, in seconds from the beginning of the step.

    A rank does its actions one at a time, in the order of its list, and begins each as early as it can: with nothing to wait for, at 0.
    An action F needs the activations of the stage before, and B and I the gradient of the stage behind, which its B or I computes; W needs
    nothing of another stage. Stage s is chunk s // ranks of rank s % ranks. What one rank computes for another arrives `transfer` seconds
    after it is computed, and neither rank's work waits for the sending.

    Args:
        schedule: the actions of each rank, as `validate` accepts them; thousands, in a long step.
        chunks: of each rank.
        seconds: seconds(action, stage) is how long an action takes on a stage. Stages need not take equally long.
        transfer: seconds from rank to rank. With a single rank nothing is sent.

    Returns:
        For each rank a list: for each of its actions the tuple (begin, end).

    >>> schedule = [[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]]
    >>> simulate(schedule, chunks=1, seconds=lambda action, stage: 2.0 if action.kind == "B" else 1.0, transfer=0.5)
    [[(0.0, 1.0), (5.0, 7.0)], [(1.5, 2.5), (2.5, 4.5)]]
    """


def make_timeline(schedule: Schedule, microbatches: int, chunks: int = 1, times: Times = Times()) -> Timeline:  # noqa: B008 (frozen)
    """The timeline of a schedule, which is validated first.

    Raises:
        ScheduleError: the schedule cannot be run.

    >>> make_timeline([[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]], microbatches=1).seconds   # 1 + 1 + 2 + 2
    6.0
    """
    most = validate(schedule, microbatches, chunks)
    rows = simulate(schedule, chunks, times.of, times.transfer)
    return Timeline([[Span(a, *span) for a, span in zip(*both, strict=True)] for both in zip(schedule, rows, strict=True)], most)


def draw(timeline: Timeline, columns: int = 100) -> str:
    """A timeline as text, a row for each rank: digits for forward passes, letters from a for the backward passes of the same micro-batches,
    w for weight gradients, dots in the bubble.

    >>> print(draw(make_timeline([[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]], microbatches=1), columns=6))
    rank 0  0...aa
    rank 1  .0aa..
    """
    per_column = timeline.seconds / columns
    lines = []
    for rank, row in enumerate(timeline.rows):
        cells = ["."] * columns
        for action, begin, end in row:
            sign = {"F": str(action.microbatch % 10), "W": "w"}.get(action.kind, chr(ord("a") + action.microbatch % 22))
            for column in range(round(begin / per_column), max(round(end / per_column), round(begin / per_column) + 1)):
                cells[min(column, columns - 1)] = sign
        lines.append(f"rank {rank}  {''.join(cells)}")
    return "\n".join(lines)
