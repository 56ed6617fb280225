"""Chapter 08. Schedule validation: a pipeline schedule is checked as data before any rank runs it, and its deadlocks are found.

    actions     each once; backward after forward, weight part after input part
    messages    on each way between two ranks, received in the order in which they are sent: a message has no name
    waiting     replayed: no ring of ranks that wait for each other

The replay knows two kinds of sends. A buffered one returns at once, like the asynchronous sends of `shared.parallel.pipeline.runner`. A
blocking one returns when the other rank receives: 1F1B then deadlocks, because neighbours send to each other at the same time.

Left out on purpose: buffers of limited size, which lie between the two.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    shared.parallel.pipeline.validate.ScheduleError: Rank 1, action 3 of 4 (F0): F0 is in the list already.
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
    """What a rank does at one moment of a replay: it receives a message, runs an action, or sends a message."""

    does: str
    action: Action
    message: Message | None = None


def steps_of(rank: int, actions: Sequence[Action], shape: Shape) -> Iterator[Step]:
    """An action is up to three steps: receive, run, send."""
    for action in actions:
        if needed := shape.needed(rank, action):
            yield Step("receive", action, needed)
        yield Step("run", action)
        if given := shape.given(rank, action):
            yield Step("send", action, given)


def replay(schedule: Schedule, shape: Shape, blocking: bool) -> None:
    """Run a schedule without time or numbers.

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
    """Whether the message's sender stands at this very send."""
    own, place = steps[message.source], places[message.source]
    return place < len(own) and own[place] == Step("send", own[place].action, message)


def waiting(step: Step) -> str:
    if step.does == "send":
        return f"{step.action} sends to rank {step.message.to}"
    return f"{step.action} waits for the {step.message}"
