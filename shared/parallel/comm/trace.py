"""Chapter 06. The trace: every operation between ranks, with its bytes and its time, so that traffic is counted and not believed.

Bytes are those of the whole tensor that an operation is about. What a rank must send for it depends on how it is done;
`shared.parallel.planning.costs` has the formulas.

Left out on purpose: when an operation was really under way. `begin` and `end` are this rank's calls, as its Python sees them.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.parallel.comm.communicator import Communicator

KEPT = 100_000  # entries; a run of a million steps must not fill the memory with them
RECENT = 4  # of the operations between the same ranks


@dataclass(slots=True)
class TraceEntry:
    """One operation of one rank.

    begin, end: seconds on the trace's clock; `end` is None while it is under way, and is when the wait for it was over.
    size: ranks in the group. phase: what the rank was doing, as `CommTrace.phase` says.
    number: which operation of the whole group it is, from 1; of a send or receive, which one from that rank to that rank.
    peer: the global rank that a send or receive is with; None for the others. split_number: of the group, as its `Communicator` says.
    between: the global ranks that it is between; of a send or receive, from whom and to whom.
    """

    operation: str
    axis: str
    bytes: int
    size: int
    begin: float
    end: float | None = None
    phase: str = ""
    number: int = 0
    peer: int | None = None
    split_number: int = 0
    between: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """For messages: which operation of which group."""
        if self.peer is not None:
            return f"{self.operation} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"
        return f"{self.operation} #{self.number} of {self.axis}"


class CommTrace:
    """What one rank has said, over all its groups.

    Attributes:
        entries: the operations in the order in which they were begun; of a long run, the last ones.
        phase: a word for what comes next, such as "forward" or "backward"; it stands in each entry.
        step: of the training run; 0 where nobody says.
        last: the operation that was begun last. waiting: the one that this rank waits for now. Both include operations that are no traffic.
        recent: the last operations between the same ranks, so that ranks can compare what they called.
    """

    def __init__(self):
        self.entries: list[TraceEntry] = []
        self.phase, self.step = "", 0
        self.last: TraceEntry | None = None
        self.waiting: TraceEntry | None = None
        self.recent: dict[tuple, deque[TraceEntry]] = {}
        self.clear()

    def record(self, operation: str, group: "Communicator", size_in_bytes: int, peer: int | None, is_traffic: bool) -> TraceEntry:
        """Note an operation that begins. is_traffic: whether it counts as traffic and is listed in `entries`."""
        entry = TraceEntry(operation, group.axis, size_in_bytes, group.size, time.perf_counter() - self.zero, phase=self.phase)
        entry.number, entry.split_number, entry.between = group.number, group.split_number, group.members
        if peer is not None:
            me, entry.peer = group.members[group.rank], group.members[peer]
            entry.between = (me, entry.peer) if operation == "send" else (entry.peer, me)
        recent = self.recent.setdefault((entry.split_number, peer is None, entry.between), deque(maxlen=RECENT))
        if peer is not None:
            entry.number = recent[-1].number + 1 if recent else 1
        recent.append(entry)
        self.last = entry
        if is_traffic:
            self.entries.append(entry)
            self.counted[operation, group.axis] += 1
            self.summed[operation, group.axis] += size_in_bytes
            if len(self.entries) >= 2 * KEPT:
                del self.entries[:KEPT]
        return entry

    def calls(self) -> Counter[tuple[str, str]]:
        """(operation, axis) -> how often."""
        return self.counted.copy()

    def bytes(self) -> Counter[tuple[str, str]]:
        """(operation, axis) -> bytes of the tensors."""
        return self.summed.copy()

    def unfinished(self) -> TraceEntry | None:
        """The first operation that was begun and never waited for."""
        return next((entry for entry in self.entries if entry.end is None), None)

    def clear(self) -> None:
        """Count from here on, with the clock at zero."""
        self.entries.clear()
        self.counted: Counter[tuple[str, str]] = Counter()
        self.summed: Counter[tuple[str, str]] = Counter()
        self.zero = time.perf_counter()


class TracedWork:
    """Work that notes in the trace when it is waited for."""

    def __init__(self, work: Any, entry: TraceEntry, trace: CommTrace):
        self.work, self.entry, self.trace = work, entry, trace

    def wait(self) -> None:
        if self.entry.end is None:
            self.trace.waiting = self.entry
            self.work.wait()  # where it raises, `waiting` still says what it was
            self.trace.waiting = None
            self.note_end()

    def note_end(self) -> None:
        """Now; for work that somebody else waits for."""
        self.entry.end = time.perf_counter() - self.trace.zero
