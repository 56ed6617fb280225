"""Chapter 08. Schedule validation and simulation: checked as data before any rank runs it, and timed with its pipeline bubble.

    actions     each once; backward after forward, weight part after input part
    messages    on each way between two ranks, received in the order in which they are sent: a message has no name
    waiting     replayed: no ring of ranks that wait for each other
    time        an action begins when its rank is free and what it needs has arrived

The replay knows two kinds of sends. A buffered one returns at once, like the asynchronous sends of `shared.parallel.pipeline.runner`. A
blocking one returns when the other rank receives: 1F1B then deadlocks, because neighbours send to each other at the same time.

With stages that all take equally long and messages that take no time, the bubble of GPipe, 1F1B and interleaved 1F1B is `bubble_fraction`,
and that of ZB-H1 is shorter by (ranks - 1) times what input and weight gradients of a micro-batch would have waited (Qi et al. 2023, table
1).

Left out on purpose: buffers of limited size, links that several messages share, and a rank whose speed changes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.course.binding import exercise
from shared.course.errors import CourseError
from shared.parallel.pipeline.schedules import Action, Message, Schedule, Shape


class ScheduleError(CourseError):
    """A schedule that cannot be run, with the place."""


def validate(schedule: Schedule, microbatches: int, chunks: int = 1, blocking: bool = False) -> list[int]:
    """Check a schedule, and count what it keeps.

    Args:
        schedule: the actions of each rank.
        microbatches: of a step.
        chunks: of each rank.
        blocking: whether a send waits until the other rank receives; if not, it returns at once.

    Returns:
        For each rank the most activations at a time, in micro-batches of one chunk: from their forward pass to the end of their backward
        pass, or of its weight part.

    Raises:
        ScheduleError: the first fault that was found, with rank, action and its place in the rank's list.

    >>> validate([[Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)], [Action("F", 0), Action("B", 0)] * 2], 2)
    Traceback (most recent call last):
    shared.parallel.pipeline.simulate.ScheduleError: Rank 1, action 3 of 4 (F0): F0 is in the list already.
    """
    marks = [check_rank(rank, actions, microbatches, chunks) for rank, actions in enumerate(schedule)]
    shape = Shape(len(schedule), chunks)
    check_order(schedule, shape)
    replay(schedule, shape, blocking)
    return marks


def check_rank(rank: int, actions: Sequence[Action], microbatches: int, chunks: int) -> int:
    """Check one rank's actions by themselves. Returns the most activations that it keeps at a time."""
    done: set[Action] = set()
    kept = most = 0
    for place, action in enumerate(actions, 1):
        kind, part = action.kind, lambda kind, action=action: action._replace(kind=kind)
        needed = {"F": None, "B": "F", "I": "F", "W": "I"}.get(kind, "")
        fault = None
        if needed == "":
            fault = f"there is no kind {kind!r}: give F, B, I or W"
        elif not (0 <= action.microbatch < microbatches and 0 <= action.chunk < chunks):
            fault = f"there are {microbatches} micro-batches and {chunks} chunks, counted from 0"
        elif action in done:
            fault = f"{action} is in the list already"
        elif kind in "BI" and part("I" if kind == "B" else "B") in done:
            fault = "its backward pass is in the list already, whole or as I and W"
        elif needed and part(needed) not in done:
            fault = f"it comes before {part(needed)}"
        if fault:
            raise ScheduleError(f"Rank {rank}, action {place} of {len(actions)} ({action}): {fault}.")
        done.add(action)
        kept += {"F": 1, "I": 0}.get(kind, -1)
        most = max(most, kept)
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            forward, backward, first, second = (Action(kind, microbatch, chunk) for kind in ("F", "B", "I", "W"))
            missing = [forward] if forward not in done else [second if first in done else backward]
            if missing[0] not in done:
                raise ScheduleError(f"Rank {rank} never does {missing[0]}: its list of {len(actions)} actions lacks it.")
    return most


def check_order(schedule: Schedule, shape: Shape) -> None:
    """On each way between two ranks, messages must be received in the order in which they are sent."""
    sent: dict[tuple, list[Message]] = {}
    for rank, actions in enumerate(schedule):
        for message in filter(None, (shape.given(rank, action) for action in actions)):
            sent.setdefault(message.way, []).append(message)
    arriving = {way: iter(messages) for way, messages in sent.items()}
    for rank, actions in enumerate(schedule):
        for place, action in enumerate(actions, 1):
            expected = shape.needed(rank, action)
            if expected is not None and (found := next(arriving[expected.way])) != expected:
                raise ScheduleError(
                    f"Rank {rank}, action {place} of {len(actions)} ({action}): it needs the {expected}, and what rank {expected.source} "
                    f"sends next on this way are the {found}. Messages have no names: give both ranks the same order."
                )


class Step(NamedTuple):
    """A step of a replay: a rank receives a message, runs an action, or sends a message."""

    does: str
    action: Action
    message: Message | None = None


def steps_of(rank: int, actions: Sequence[Action], shape: Shape) -> Iterator[Step]:
    """The steps of a rank's actions: receive, run, send."""
    for action in actions:
        if needed := shape.needed(rank, action):
            yield Step("receive", action, needed)
        yield Step("run", action)
        if given := shape.given(rank, action):
            yield Step("send", action, given)


def replay(schedule: Schedule, shape: Shape, blocking: bool) -> None:
    """Replay a schedule's messages, without time or tensors.

    Raises:
        ScheduleError: a deadlock, with what each rank waits for.
    """
    steps = [list(steps_of(rank, actions, shape)) for rank, actions in enumerate(schedule)]
    places = [0] * len(schedule)
    sent: set[Message] = set()  # and by blocking sends, those that have been received
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(steps):
            while places[rank] < len(own):
                step = own[places[rank]]
                if step.does == "receive" and step.message not in sent:
                    if not (blocking and sends_now(steps, places, step.message)):
                        break
                    places[step.message.source] += 1
                elif step.does == "send":
                    if blocking:
                        break
                    sent.add(step.message)
                places[rank] += 1
                moved = True
    stuck = [(rank, own[place]) for rank, (own, place) in enumerate(zip(steps, places, strict=True)) if place < len(own)]
    if stuck:
        waits = [f"rank {rank} in {waiting(step)}" for rank, step in stuck]
        how = "sends that wait until they are received" if blocking else "sends that return at once"
        raise ScheduleError(f"Deadlock, with {how}: " + "; ".join(waits) + ".")


def sends_now(steps: Sequence[Sequence[Step]], places: Sequence[int], message: Message) -> bool:
    """Whether the sender is about to send this message."""
    own, place = steps[message.source], places[message.source]
    return place < len(own) and own[place] == Step("send", own[place].action, message)


def waiting(step: Step) -> str:
    if step.does == "send":
        return f"{step.action} sends to rank {step.message.to}"
    return f"{step.action} waits for the {step.message}"


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
    An action F needs the activations of the previous stage, B and I the gradient of the next stage, which its B or I computes; W needs
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
