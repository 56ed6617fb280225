"""Chapter 06. Who will never go on: what follows from what each rank says of itself.

A rank that waits in the n-th operation of a group goes on once every other member has begun its own n-th. So: ranks that do not wait
can go on; so can those that wait only for operations that have begun, or for ranks that can; and the others never will, all together,
however long anyone waits. Nothing here depends on time, so ranks that are slow are never taken for stuck.

Left out on purpose: what a tensor means. Ranks that add up different tensors of one size are found by `shared.parallel.health.replicas`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.parallel.comm.trace import TraceEntry, CommTrace

OWN_SIZES = {"gather_objects", "all_to_all"}  # operations that each rank calls with as many bytes as it likes


class Call(NamedTuple):
    """One operation as the other ranks are told of it.

    between: the global ranks that it is between, in the group's order; of a send or receive, from whom and to whom.
    number: which one it is of those between the same ranks, from 1.
    """

    operation: str
    number: int
    bytes: int
    place: str
    split_number: int
    pairwise: bool
    between: tuple[int, ...]

    @classmethod
    def of(cls, entry: TraceEntry) -> "Call":
        kind = entry.operation, entry.number, entry.bytes, entry.place
        return cls(*kind, entry.split_number, entry.peer is not None, entry.between)

    @classmethod
    def read(cls, fields: list) -> "Call":
        """As JSON gives it back."""
        return cls(*fields[:-1], tuple(fields[-1]))

    @property
    def route(self) -> tuple[int, bool, tuple[int, ...]]:
        return self.split_number, self.pairwise, self.between

    def fits(self, other: "Call") -> bool:
        """Whether two ranks' calls of one number on one route are the same operation."""
        sizes = self.bytes == other.bytes or self.operation in OWN_SIZES
        return sizes and (self.pairwise or self.operation == other.operation)


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself, every second.

    number: from 1. step: of the training run, 0 where nobody says. waiting: the operation that it waits for. last: that it began last.
    stands: where in the code. recent: the last operations on each route, the newest last. ended: why the rank is not there any more.
    """

    number: int
    step: int = 0
    waiting: Call | None = None
    last: str = ""
    stands: str = ""
    recent: list[list[Call]] = field(default_factory=list)
    ended: str = ""

    @classmethod
    def of(cls, number: int, trace: CommTrace, stands: str, ended: str = "") -> "Beat":
        """`waiting` is read before `recent`, so that what is newer can only show more as begun."""
        waiting, last = trace.waiting, trace.last
        recent = [[Call.of(entry) for entry in route.copy()] for route in list(trace.recent.values())]
        return cls(number, trace.step, waiting and Call.of(waiting), last.place if last else "", stands, recent, ended)

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Beat":
        fields = json.loads(text)
        fields["waiting"] = fields["waiting"] and Call.read(fields["waiting"])
        fields["recent"] = [[Call.read(each) for each in route] for route in fields["recent"]]
        return cls(**fields)

    @property
    def state(self) -> tuple[Call | None, list[list[Call]]]:
        """What changes whenever the rank goes on, and never comes back."""
        return self.waiting, self.recent

    def begun(self, call: Call) -> bool:
        """Whether this rank has begun what another one means by `call`."""
        return any(route[-1].number >= call.number for route in self.recent if route and route[-1].route == call.route)

    def called_last(self) -> str:
        return f"it was last in {self.last}" if self.last else "it had not yet called anything"


def mismatch(beats: Mapping[int, Beat]) -> str | None:
    """A sentence for two ranks that called different things where they had to call the same, if the last operations show any."""
    first: dict[tuple, tuple[int, Call]] = {}
    for rank, beat in sorted(beats.items()):
        for call in (call for route in beat.recent for call in route):
            earlier, theirs = first.setdefault((call.route, call.number), (rank, call))
            if not theirs.fits(call):
                return f"mismatch: rank {earlier} calls {described(theirs)}; rank {rank} calls {described(call)}"
    return None


def described(call: Call) -> str:
    return f"{call.place} with {call.bytes:,} bytes"


def stuck(beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that wait and will never go on."""
    free = {rank for rank, beat in beats.items() if beat.waiting is None and not beat.ended}
    while True:
        more = {
            rank
            for rank, beat in beats.items()
            if rank not in free
            and beat.waiting is not None
            and not beat.ended
            and all(other == rank or other in free or beats[other].begun(beat.waiting) for other in beat.waiting.between)
        }
        if not more:
            return sorted(rank for rank in beats.keys() - free if beats[rank].waiting is not None and not beats[rank].ended)
        free |= more


def deadlock(beats: Mapping[int, Beat], ranks: list[int]) -> str:
    """The sentence for ranks that are stuck, with those that they wait for and that have ended."""
    needed = {other for rank in ranks for other in beats[rank].waiting.between}
    places = {rank: f"waits in {beats[rank].waiting.place}" for rank in ranks}
    places |= {rank: beats[rank].ended for rank in needed if beats[rank].ended}
    return "deadlock: " + "; ".join(f"rank {rank} {places[rank]}" for rank in sorted(places))
