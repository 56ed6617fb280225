"""Chapter 08. Pipeline simulation: when each action of a schedule begins and ends, and the pipeline bubble, in which ranks wait.

Each rank does its actions in order; one begins when the rank is free and what it needs has arrived. With stages that all take equally long
and messages that take no time, the bubble of GPipe, 1F1B and interleaved 1F1B is `bubble_fraction`, and that of ZB-H1 is shorter by
(ranks - 1) times what input and weight gradients of a micro-batch would have waited (Qi et al. 2023, table 1).

Left out on purpose: links that several messages share, and a rank whose speed changes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.parallel.pipeline.schedules import Action, Schedule
from shared.parallel.pipeline.validate import Message, Shape, validate


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
    most: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(row[-1].end for row in self.rows)

    def bubble(self, rank: int = 0) -> float:
        """The time in which a rank does nothing, as a fraction of that in which it computes."""
        busy = sum(span.end - span.begin for span in self.rows[rank])
        return (self.seconds - busy) / busy


def simulate(schedule: Schedule, microbatches: int, chunks: int = 1, times: Times = Times()) -> Timeline:  # noqa: B008 (frozen)
    """The timeline of a schedule.

    Raises:
        ScheduleError: the schedule cannot be run.

    >>> simulate([[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]], microbatches=1).seconds     # 1 + 1 + 2 + 2
    6.0
    """
    timeline = Timeline([[] for _ in schedule], validate(schedule, microbatches, chunks))
    shape, arrivals = Shape(len(schedule), chunks), dict[Message, float]()
    while any(len(row) < len(actions) for row, actions in zip(timeline.rows, schedule, strict=True)):
        for rank, (row, actions) in enumerate(zip(timeline.rows, schedule, strict=True)):
            for action in actions[len(row) :]:
                needed, given = shape.needed(rank, action), shape.given(rank, action)
                if needed is not None and needed not in arrivals:
                    break
                begin = max(row[-1].end if row else 0.0, arrivals.get(needed, 0.0))
                row.append(Span(action, begin, begin + times.of(action, action.chunk * len(schedule) + rank)))
                if given is not None:
                    arrivals[given] = row[-1].end + times.transfer
    return timeline


def draw(timeline: Timeline, columns: int = 100) -> str:
    """A timeline as text, a row for each rank: digits for forward passes, letters from a for the backward passes of the same micro-batches,
    w for weight gradients, dots in the bubble.

    >>> print(draw(simulate([[Action("F", 0), Action("B", 0)], [Action("F", 0), Action("B", 0)]], microbatches=1), columns=6))
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
