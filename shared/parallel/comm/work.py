"""Chapter 06. Handles of asynchronous operations (work): what a collective returns, to be waited for before its tensors are read."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from shared.parallel.comm.trace import CommTrace, TraceEntry


class Work(Protocol):
    """A handle of an asynchronous operation. Do not read or write its tensors before `wait` has returned."""

    def wait(self) -> None: ...


class CompletedWork:
    """Work that had completed when the call returned."""

    def wait(self) -> None:
        return None


class DeferredWork:
    """Work whose last part, `finish`, runs in the first call of `wait`."""

    def __init__(self, finish: Callable[[], Any]):
        self.finish: Callable[[], Any] | None = finish

    def wait(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


class TracedWork:
    """Work whose `wait` writes the end of the operation into the trace."""

    def __init__(self, work: Any, entry: TraceEntry, trace: CommTrace):
        self.work, self.entry, self.trace = work, entry, trace

    def wait(self) -> None:
        if self.entry.end is None:
            self.trace.waiting = self.entry
            self.work.wait()  # where this raises, `waiting` still names the operation
            self.trace.waiting = None
            self.note_end()

    def note_end(self) -> None:
        """Record the end now; for work that somebody else waits for."""
        self.entry.end = time.perf_counter() - self.trace.zero
