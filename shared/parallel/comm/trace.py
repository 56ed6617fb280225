"""Chapter 06. The communication trace of a rank, or flight recorder: each collective, send and receive with its bytes and its time; and
the handle of an asynchronous operation.

`bytes` is the size of the full tensor of an operation. How much a rank sends for it depends on the algorithm; the formulas are in
`shared.parallel.planning.costs`.

Left out on purpose: when bytes are really on the wire. `begin` and `end` are the times of this rank's calls, as its Python sees them.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_ENTRIES = 100_000  # so that a run of a million steps does not fill the memory with them
RECENT = 4  # operations kept for each group of ranks
VARIABLE_SIZE = {"gather_objects", "all_to_all"}  # operations for which each rank may pass a different number of bytes


class Work:
    """A handle of an asynchronous operation. Do not read or write its tensors before `wait` has returned.

    finish: completes the operation, in the first call of `wait`; None where it is complete.
    """

    def __init__(self, finish: Callable[[], Any] | None = None):
        self.finish = finish

    def wait(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


@dataclass(slots=True)
class TraceEntry:
    """One operation of one rank.

    Attributes:
        axis: the group's name: world, dp, fsdp, ...
        bytes: the size of the full tensor.
        size: the number of ranks in the group.
        begin, end: seconds on the trace's clock: when the operation was started, and when `wait` returned; `end` is None until then.
        phase: what the rank was doing, from `CommTrace.phase`.
        number: counts the operations of the group from 1; for a send or receive, those from the same sender to the same receiver.
        peer: the other global rank of a send or receive; None for collectives.
        split_number: which split of the world made the group; 0 is the world.
        ranks: the global ranks that take part, in the group's order; for a send or receive, (sender, receiver).
        arguments: what all ranks must pass alike: reduction, root, dtype and shape.
    """

    operation: str
    axis: str
    bytes: int
    size: int
    begin: float = math.nan
    end: float | None = None
    phase: str = ""
    number: int = 0
    peer: int | None = None
    split_number: int = 0
    ranks: tuple[int, ...] = ()
    arguments: str = ""

    @property
    def key(self) -> tuple[int, bool, tuple[int, ...]]:
        """Operations with one key are started in the same order by all of its ranks."""
        return self.split_number, self.peer is None, self.ranks

    def matches(self, other: "TraceEntry") -> bool:
        """Whether two ranks' operations of one key and number are the same."""
        same_size = self.bytes == other.bytes or self.operation in VARIABLE_SIZE
        return same_size and (self.peer is not None or (self.operation, self.arguments) == (other.operation, other.arguments))

    @property
    def description(self) -> str:
        """The operation and its group in words, for error messages."""
        if self.peer is not None:
            return f"{self.operation} {'to' if self.operation == 'send' else 'from'} rank {self.peer}"
        return f"{self.operation} #{self.number} of {self.axis}"


class CommTrace:
    """Records the operations of one rank, in all its groups.

    Attributes:
        entries: the operations in the order in which they were started; in a long run, the last ones.
        phase: what the rank does now, such as "forward" or "backward"; each new entry copies it.
        step: the step of the training run; 0 outside of one.
        last: the operation that was started last. waiting: the operation that this rank waits for now. Both may be no traffic.
        recent: the last operations of each group of ranks, which the ranks compare to find calls that do not match.
    """

    def __init__(self):
        self.entries: list[TraceEntry] = []
        self.phase, self.step = "", 0
        self.last: TraceEntry | None = None
        self.waiting: TraceEntry | None = None
        self.recent: dict[tuple, deque[TraceEntry]] = {}
        self.clear()

    def record(self, entry: TraceEntry, is_traffic: bool) -> None:
        """Record that an operation starts, now. is_traffic: whether it is counted and listed in `entries`."""
        entry.begin, entry.phase = time.perf_counter() - self.zero, self.phase
        recent = self.recent.setdefault(entry.key, deque(maxlen=RECENT))
        if entry.peer is not None:
            entry.number = recent[-1].number + 1 if recent else 1
        recent.append(entry)
        self.last = entry
        if is_traffic:
            self.entries.append(entry)
            self.call_counts[entry.operation, entry.axis] += 1
            self.byte_counts[entry.operation, entry.axis] += entry.bytes
            if len(self.entries) >= 2 * MAX_ENTRIES:
                del self.entries[:MAX_ENTRIES]

    def wait(self, entry: TraceEntry, finish: Callable[[], Any] | None) -> None:
        """Complete an operation. Where `finish` raises, `waiting` still names it."""
        self.waiting = entry
        if finish is not None:
            finish()
        self.waiting = None
        self.note_end(entry)

    def note_end(self, entry: TraceEntry) -> None:
        entry.end = time.perf_counter() - self.zero

    def calls(self) -> Counter[tuple[str, str]]:
        """(operation, axis) -> number of calls."""
        return self.call_counts.copy()

    def bytes(self) -> Counter[tuple[str, str]]:
        """(operation, axis) -> bytes of the full tensors."""
        return self.byte_counts.copy()

    def unfinished(self) -> TraceEntry | None:
        """The first operation that was started and never waited for."""
        return next((entry for entry in self.entries if entry.end is None), None)

    def clear(self) -> None:
        """Drop all entries and counts, and set the clock to zero."""
        self.entries.clear()
        self.call_counts: Counter[tuple[str, str]] = Counter()
        self.byte_counts: Counter[tuple[str, str]] = Counter()
        self.zero = time.perf_counter()
