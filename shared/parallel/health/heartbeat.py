"""Chapter 06. Heartbeats of ranks, as a watchdog: a rank that waits for a dead or hanging one names it in time and ends, for a restart.

Without it, a rank that dies or hangs leaves the others waiting without an error. So a thread of each rank writes what the rank does into
the store of the rendezvous, every second, and reads what the others wrote. It ends the wait where

    a rank's heartbeat stops                     it died, its process hangs, or its machine cannot be reached
    the store does not answer                    rank 0's machine is gone, or cannot be reached
    calls do not match, or ranks deadlock        found by `shared.parallel.comm.deadlock`
    a rank is alive and has not joined an        the message has the line of its code where it is
    operation for half an hour

A rank that still sends heartbeats is left alone, however long it compiles, saves or prepares data. Collectives are not slowed down; the
thread takes about a millisecond of every second. A second thread, the watchdog, makes no call that can hang: where the network is cut, a
call to the store returns after a quarter of an hour, when the kernel gives up the connection.

Left out on purpose: hundreds of ranks, where each would read the messages of a few and not of all.
"""

import atexit
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, Work

from shared.parallel.comm.communicator import CommunicationError, RankStopped
from shared.parallel.comm.trace import CommTrace
from shared.parallel.comm.deadlock import HeartbeatMessage, deadlocked_ranks, describe_deadlock, find_mismatch

EXIT_CODE = 75  # of a rank that ends because of others: "temporary failure, try again" in sysexits.h
MISSED = 3  # heartbeats after which a rank counts as dead, where a connection broke too
RAISE_GRACE = 10.0  # seconds in which a rank's own thread can raise the problem, before its process is ended; the machine may be busy
END_GRACE = 120.0  # ... in which it can end after that, with a save that is under way


class RankLost(RankStopped):
    """Another rank is dead, or alive and never joins an operation: no error will come from it."""


@dataclass(frozen=True)
class Timeouts:
    """How many seconds a rank waits before it gives up on another one.

    heartbeat_timeout: without a heartbeat, until a rank counts as dead.
    collective_timeout: in one operation, for a rank that still sends heartbeats.
    heartbeat_interval: between two heartbeats.
    init_timeout: at the start, until all ranks have connected. Each imports its packages meanwhile, from a slow network disk perhaps; after
        a failure it covers the difference between the ranks' restarts, which is `heartbeat_timeout` and torchrun's own half minute. Nothing
        else happens before: text is prepared by ranks that have connected.
    """

    heartbeat_timeout: float = 30.0
    collective_timeout: float = 1800.0
    heartbeat_interval: float = 1.0
    init_timeout: float = 300.0


class Heartbeat:
    """Publishes the heartbeat of one rank, and watches those of the others.

    Args:
        store: the store of the rendezvous; the heartbeat opens a connection of its own.

    Attributes:
        last_seen: rank -> its last message.
        problem: why this rank must end; None while all is well.
        blocked: whether the rank's thread is in an operation that cannot be interrupted to raise the problem.
    """

    def __init__(self, store: Store, rank: int, ranks: int, trace: CommTrace, timeouts: Timeouts):
        self.store, self.rank, self.ranks, self.trace, self.timeouts = store.clone(), rank, ranks, trace, timeouts
        self.store.set_timeout(timedelta(seconds=timeouts.heartbeat_timeout))
        self.main_thread = threading.get_ident()
        self.number = 0
        self.last_seen: dict[int, HeartbeatMessage] = {}
        self.silent_seconds = dict.fromkeys(range(ranks), 0.0)  # without a new message, while this rank was watching
        self.unanswered_seconds = 0.0  # since the store's last answer
        self.suspects: dict[int, HeartbeatMessage] = {}  # deadlocked ranks, with the message that showed it first
        self.last_check = self.waiting_since = time.monotonic()
        self.waiting_entry: object = None
        self.problem: CommunicationError | None = None
        self.raised, self.problem_found, self.closing = False, threading.Event(), threading.Event()
        self.connection_lost = self.blocked = False
        self.last_words = ""
        self.send()
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)
        self.watchdog = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the threads, once all ranks have connected."""
        self.last_check = time.monotonic()
        self.thread.start()
        self.watchdog.start()
        atexit.register(self.at_exit)

    # In the rank's own thread.

    def wait(self, work: Work) -> None:
        """Wait for an operation of gloo, unless a problem is found.

        Raises:
            CommunicationError: the problem.
        """
        while True:
            completed = work.is_completed()  # read before the wait: the operation may complete right after the time is over
            try:
                work.wait(timedelta(seconds=self.timeouts.heartbeat_interval))
                return
            except RuntimeError as error:  # torch has one class for a timeout and for a connection that broke
                if completed:
                    raise self.connection_error(error) from error
            self.raise_if_failed()

    def connection_error(self, error: Exception) -> CommunicationError:
        """The error for a connection that broke in the operation that this rank waits for; it names the rank that failed, if that is
        found soon."""
        operation = self.trace.waiting.description if self.trace.waiting else "an operation"
        reason = (str(error).splitlines() or [""])[0]
        self.connection_lost = True
        self.problem_found.wait(self.timeouts.heartbeat_timeout)
        self.problem = self.problem or RankStopped(f"rank {self.rank} lost its connection to another rank in {operation} ({reason})")
        self.raised = True
        return self.problem

    def raise_if_failed(self) -> None:
        if self.problem is not None:
            self.raised = True
            raise self.problem

    def close(self, ended: str) -> None:
        """Publish that this rank is gone, and stop. ended: what it did, as in "has finished"."""
        if self.closing.is_set():
            return
        self.last_words = ended
        self.closing.set()
        if self.unanswered_seconds < self.timeouts.heartbeat_timeout:
            self.thread.join(RAISE_GRACE)

    def at_exit(self) -> None:
        """Run at the interpreter's exit. Torch's threads last as long as their operations, so after a failure the process is ended."""
        self.close(f"stopped: {self.problem}" if self.problem else "has ended")
        if self.problem is not None:
            end_process()

    # In the heartbeat's thread, which makes all calls to the store, so nothing can overwrite the last message.

    def run(self) -> None:
        try:
            while not self.closing.wait(self.timeouts.heartbeat_interval):
                self.send()
                self.check()
                self.unanswered_seconds = 0.0
        except RuntimeError as error:
            lost = f"rank {self.rank} cannot reach the store of the rendezvous: the machine of rank 0 is gone ({error})"
            self.fail(RankLost(lost))
            self.closing.wait()
        try:
            self.send(self.last_words)
        except RuntimeError:  # the store is gone as well, so no rank is left to read it
            pass

    def send(self, ended: str = "") -> None:
        """Publish what this rank does."""
        self.number += 1
        text = HeartbeatMessage.of(self.number, self.trace, code_location(self.main_thread), ended).to_json()
        self.store.set(f"heartbeat/{self.rank}", text)

    def check(self) -> None:
        """Read every rank's last message, and look for a problem."""
        texts = self.store.multi_get([f"heartbeat/{rank}" for rank in range(self.ranks)])
        messages = {rank: HeartbeatMessage.from_json(text) for rank, text in enumerate(texts)}
        now = time.monotonic()
        passed = min(now - self.last_check, 2 * self.timeouts.heartbeat_interval)  # this process itself may have been suspended
        self.last_check = now
        for rank, message in messages.items():
            is_new = rank not in self.last_seen or message.number > self.last_seen[rank].number
            self.silent_seconds[rank] = 0.0 if is_new or message.ended else self.silent_seconds[rank] + passed
        self.last_seen = messages
        checks = (
            (CommunicationError, find_mismatch(messages)),
            (RankStopped, self.failed_rank()),
            (RankLost, self.dead_rank()),
            (CommunicationError, self.deadlock()),
            (RankLost, self.timeout(now)),
        )
        for kind, sentence in checks:
            if sentence:
                self.fail(kind(sentence))

    def fail(self, problem: CommunicationError) -> None:
        """Keep the first problem."""
        if self.problem is None:
            self.problem = problem
            self.problem_found.set()

    def failed_rank(self) -> str | None:
        """The first rank that ended with an error."""
        failed = {rank: message.ended for rank, message in self.last_seen.items() if message.ended.startswith("stopped")}
        return next((f"rank {rank} {ended}" for rank, ended in failed.items()), None)

    def dead_rank(self) -> str | None:
        """A rank without a heartbeat for `heartbeat_timeout`."""
        limit = self.timeouts.heartbeat_timeout
        if self.connection_lost:
            limit = min(limit, MISSED * self.timeouts.heartbeat_interval)
        for rank, seconds in self.silent_seconds.items():
            if seconds >= limit and rank != self.rank:
                message = self.last_seen[rank]
                step = f" (step {message.step})" if message.step else ""
                silent = f"rank {rank} has sent no heartbeat for {seconds:.0f} s: it died, hangs or cannot be reached"
                return f"{silent}; {message.last_call()}{step}"
        return None

    def deadlock(self) -> str | None:
        """Ranks that were deadlocked at one moment, since each was in the same state before it and after it: messages are read one after
        the other."""
        found = deadlocked_ranks(self.last_seen)
        if not found or any(self.last_seen[rank].state != self.suspects[rank].state for rank in found if rank in self.suspects):
            self.suspects = {}
        self.suspects = {rank: self.suspects.get(rank, self.last_seen[rank]) for rank in found}
        confirmed = found and all(self.last_seen[rank].number >= message.number + 2 for rank, message in self.suspects.items())
        return describe_deadlock(self.last_seen, found) if confirmed else None

    def timeout(self, now: float) -> str | None:
        """An operation that this rank has waited in for `collective_timeout`, with the ranks that have not joined it."""
        entry = self.trace.waiting
        if entry is not self.waiting_entry:
            self.waiting_entry, self.waiting_since = entry, now
        if entry is None or now - self.waiting_since < self.timeouts.collective_timeout:
            return None
        missing = [rank for rank in entry.ranks if rank != self.rank and not self.last_seen[rank].has_started(entry)]
        states = "; ".join(
            f"rank {rank} is alive and has not joined: {self.last_seen[rank].last_call()}, {self.last_seen[rank].location}"
            for rank in missing
        )
        return f"rank {self.rank} has waited {now - self.waiting_since:.0f} s in {entry.description}: {states or 'all ranks are in it'}"

    # In the watchdog's thread.

    def watch(self) -> None:
        """Find that the store does not answer, and end the process where its own thread does not raise the problem and end."""
        timeouts, last, failed_at = self.timeouts, time.monotonic(), None
        while not self.closing.wait(timeouts.heartbeat_interval):
            now = time.monotonic()
            self.unanswered_seconds += min(now - last, 2 * timeouts.heartbeat_interval)  # this process may have been suspended
            last = now
            if self.unanswered_seconds >= timeouts.heartbeat_timeout:
                silent = f"rank {self.rank} has had no answer from the machine of rank 0 for {self.unanswered_seconds:.0f} s"
                self.fail(RankLost(f"{silent}: it is gone, hangs or cannot be reached"))
            if self.problem is None:
                continue
            failed_at = failed_at or now
            grace = MISSED * timeouts.heartbeat_interval
            grace = END_GRACE if self.raised else grace if self.blocked else max(grace, RAISE_GRACE)
            if now - failed_at > grace:
                end_process(self.problem)  # the rank is in an operation that is not ours, or computes


@contextmanager
def deadline(seconds: float, sentence: str) -> Iterator[None]:
    """End the process with `sentence` unless the block ends within `seconds`; for calls that take no timeout, or exceed it."""
    timer = threading.Timer(seconds, end_process, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(reason: object = "") -> None:
    """End this process at once with `EXIT_CODE`, whatever its threads wait for."""
    if reason:
        print(f"\n{reason}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_CODE)


def code_location(thread: int) -> str:
    """The innermost line of a thread's stack that is neither in Python's standard library nor in an installed package."""
    frame = innermost = sys._current_frames().get(thread)
    foreign = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    while frame is not None and frame.f_code.co_filename.startswith(foreign):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its main thread has ended"
    code = frame.f_code
    return f"now in {code.co_name} ({os.path.basename(code.co_filename)}, line {frame.f_lineno})"
