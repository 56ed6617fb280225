"""Chapter 06. Deadlock detection between processes: from what each rank's heartbeat says, find the ranks that can never continue.

A rank that waits in the n-th operation of a group continues once every other member has started its own n-th. So ranks that do not wait
can continue, and so can ranks that wait only for operations that have started, or for ranks that can continue. All others are deadlocked
(this reduces the wait-for graph). Time plays no part in it, so a slow rank never counts as deadlocked.

Left out on purpose: what a tensor means. Ranks that add up different tensors of one size are found by `shared.parallel.health.replicas`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.parallel.comm.trace import CommTrace, TraceEntry

VARIABLE_SIZE = {"gather_objects", "all_to_all"}  # operations for which each rank may pass a different number of bytes


class Call(NamedTuple):
    """One collective, send or receive, as a heartbeat message describes it to the other ranks.

    ranks: the global ranks that take part, in the group's order; for a send or receive, (sender, receiver).
    number: counts the calls with the same `key` from 1.
    """

    operation: str
    number: int
    bytes: int
    description: str
    split_number: int
    point_to_point: bool
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, entry: TraceEntry) -> "Call":
        kind = entry.operation, entry.number, entry.bytes, entry.description
        return cls(*kind, entry.split_number, entry.peer is not None, entry.ranks)

    @classmethod
    def from_json(cls, fields: list) -> "Call":
        return cls(*fields[:-1], tuple(fields[-1]))

    @property
    def key(self) -> tuple[int, bool, tuple[int, ...]]:
        """Calls with one key are made in the same order by all of its ranks."""
        return self.split_number, self.point_to_point, self.ranks

    def matches(self, other: "Call") -> bool:
        """Whether two ranks' calls of one key and number are the same operation."""
        sizes = self.bytes == other.bytes or self.operation in VARIABLE_SIZE
        return sizes and (self.point_to_point or self.operation == other.operation)


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
    waiting: Call | None = None
    last: str = ""
    location: str = ""
    recent: list[list[Call]] = field(default_factory=list)
    ended: str = ""

    @classmethod
    def of(cls, number: int, trace: CommTrace, location: str, ended: str = "") -> "HeartbeatMessage":
        """`waiting` is read before `recent`: an operation that starts in between makes more calls look started, never fewer."""
        waiting, last = trace.waiting, trace.last
        recent = [[Call.of(entry) for entry in entries.copy()] for entries in list(trace.recent.values())]
        return cls(number, trace.step, waiting and Call.of(waiting), last.description if last else "", location, recent, ended)

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "HeartbeatMessage":
        fields = json.loads(text)
        fields["waiting"] = fields["waiting"] and Call.from_json(fields["waiting"])
        fields["recent"] = [[Call.from_json(each) for each in calls] for calls in fields["recent"]]
        return cls(**fields)

    @property
    def state(self) -> tuple[Call | None, list[list[Call]]]:
        """Changes whenever the rank makes progress, and never returns to an earlier value."""
        return self.waiting, self.recent

    def has_started(self, call: Call) -> bool:
        """Whether this rank has started its own part of `call`."""
        return any(calls[-1].number >= call.number for calls in self.recent if calls and calls[-1].key == call.key)

    def last_call(self) -> str:
        return f"its last operation was {self.last}" if self.last else "it has not started any operation"


def find_mismatch(messages: Mapping[int, HeartbeatMessage]) -> str | None:
    """A sentence about two ranks whose calls do not match, where the recent calls show any."""
    first: dict[tuple, tuple[int, Call]] = {}
    for rank, message in sorted(messages.items()):
        for call in (call for calls in message.recent for call in calls):
            other_rank, other = first.setdefault((call.key, call.number), (rank, call))
            if not other.matches(call):
                return f"mismatch: rank {other_rank} calls {describe(other)}; rank {rank} calls {describe(call)}"
    return None


def describe(call: Call) -> str:
    return f"{call.description} with {call.bytes:,} bytes"


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
