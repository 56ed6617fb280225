"""Chapter 06. Deadlock detection: from what each rank last did, find calls that do not match, and the ranks that can never continue.

A rank that waits in the n-th operation of a group continues once every other member has started its own n-th. So ranks that do not wait
can continue, and so can ranks that wait only for operations that have started, or for ranks that can continue. All others are deadlocked
(this reduces the wait-for graph). Time plays no part in it, so a slow rank never counts as deadlocked. Processes send each other their
last operations in heartbeats (`shared.parallel.health.heartbeat`); threads read each other's traces.

Left out on purpose: what a tensor means. Ranks that add up different tensors of one size are found by `shared.parallel.health.replicas`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from shared.parallel.comm.trace import CommTrace, TraceEntry


@dataclass(frozen=True)
class HeartbeatMessage:
    """What a rank publishes about itself every second.

    Attributes:
        number: counts the messages from 1.
        step: the step of the training run; 0 outside of one.
        waiting: the operation that the rank waits for.
        last: the description of the operation that it started last.
        location: the line of its code where it is.
        recent: the last operations of each key, the newest one last.
        ended: why the rank is gone; empty while it runs.
    """

    number: int
    step: int = 0
    waiting: TraceEntry | None = None
    last: str = ""
    location: str = ""
    recent: list[list[TraceEntry]] = field(default_factory=list)
    ended: str = ""

    @classmethod
    def of(cls, number: int, trace: CommTrace, location: str = "", ended: str = "") -> "HeartbeatMessage":
        """`waiting` is read before `recent`: an operation that starts in between makes more calls look started, never fewer."""
        waiting, last = trace.waiting, trace.last
        recent = [list(entries.copy()) for entries in list(trace.recent.values())]
        return cls(number, trace.step, waiting, last.description if last else "", location, recent, ended)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "HeartbeatMessage":
        fields = json.loads(text)
        fields["waiting"] = fields["waiting"] and entry_of(fields["waiting"])
        fields["recent"] = [[entry_of(each) for each in calls] for calls in fields["recent"]]
        return cls(**fields)

    @property
    def state(self) -> tuple[TraceEntry | None, list[list[TraceEntry]]]:
        """Changes whenever the rank makes progress, and never returns to an earlier value."""
        return self.waiting, self.recent

    def has_started(self, call: TraceEntry) -> bool:
        """Whether this rank has started its own part of `call`."""
        return any(calls[-1].number >= call.number for calls in self.recent if calls and calls[-1].key == call.key)

    def last_call(self) -> str:
        return f"its last operation was {self.last}" if self.last else "it has not started any operation"


def entry_of(fields: dict) -> TraceEntry:
    return TraceEntry(**fields | {"ranks": tuple(fields["ranks"])})


def find_mismatch(messages: Mapping[int, HeartbeatMessage]) -> str | None:
    """A sentence about two ranks whose calls do not match, where the recent calls show any."""
    together: dict[tuple, dict[int, TraceEntry]] = {}
    for rank, message in sorted(messages.items()):
        for call in (call for calls in message.recent for call in calls):
            together.setdefault((call.key, call.number), {})[rank] = call
    return next(filter(None, map(mismatch_of, together.values())), None)


def mismatch_of(calls: Mapping[int, TraceEntry]) -> str | None:
    """A sentence about two of the ranks' calls, of one key and number, that do not match, where there are any."""
    (first, call), *others = sorted(calls.items())
    for rank, other in others:
        if not call.matches(other):
            place = f"message #{call.number} from rank {call.ranks[0]} to rank {call.ranks[1]}"
            place = f"operation #{call.number} of {call.axis}" if call.peer is None else place
            told = (f"{each.operation}{each.arguments}" for each in (call, other))
            return f"mismatch: in {place}, rank {first} calls {next(told)}; rank {rank} calls {next(told)}"
    return None


def deadlocked_ranks(messages: Mapping[int, HeartbeatMessage]) -> list[int]:
    """The ranks that wait and can never continue."""
    can_continue = {rank for rank, message in messages.items() if message.waiting is None and not message.ended}
    while True:
        more = {
            rank
            for rank, message in messages.items()
            if rank not in can_continue
            and message.waiting is not None
            and not message.ended
            and all(
                other == rank or other in can_continue or messages[other].has_started(message.waiting) for other in message.waiting.ranks
            )
        }
        if not more:
            rest = sorted(messages.keys() - can_continue)
            return [rank for rank in rest if messages[rank].waiting is not None and not messages[rank].ended]
        can_continue |= more


def describe_deadlock(messages: Mapping[int, HeartbeatMessage], ranks: list[int]) -> str:
    """The error message for deadlocked ranks, and for the ranks that they wait for and that have ended."""
    needed = {other for rank in ranks for other in messages[rank].waiting.ranks}
    states = {rank: f"waits in {messages[rank].waiting.description}" for rank in ranks}
    states |= {rank: messages[rank].ended for rank in needed if messages[rank].ended}
    return "deadlock: " + "; ".join(f"rank {rank} {states[rank]}" for rank in sorted(states))
