"""Chapter 06. The heartbeat: ranks that wait say for whom, within a set time, and end so that the run can be started again.

A rank that dies or hangs leaves the others waiting for it, for ever and without a word. So a thread of each rank writes what it does into
the store where the ranks met, every second, and reads what the others wrote. It ends the wait where

    a rank's heartbeat stops                           it died, or its process hangs
    calls do not match, or can never meet              a deadlock: `shared.parallel.health.deadlock`
    a rank lives, and does not come for half an hour   with the line of its code where it is

A rank whose heart beats may otherwise take its time: it compiles, saves, or prepares data. An operation costs nothing for all this; the
thread costs about a millisecond of every second.

Left out on purpose: hundreds of ranks, where each would read the beats of a few and not of all.
"""

import atexit
import os
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, Work

from shared.parallel.comm.communicator import CommunicationError, RankStopped
from shared.parallel.comm.trace import CommTrace
from shared.parallel.health.deadlock import Beat, deadlock, mismatch, stuck

EXIT_CODE = 75  # of a rank that ends because of others: "temporary failure, try again" in sysexits.h
MISSED = 3  # beats after which a rank is gone, where a connection broke too
LAST_WORDS = 10.0  # seconds that a rank has, once it must end, to come by and raise the problem itself; its machine may be busy


class RankLost(RankStopped):
    """Another rank is silent, or lives and does not come: it will tell nothing."""


@dataclass(frozen=True)
class Timeouts:
    """How many seconds a rank waits before it gives up on another one.

    heartbeat_timeout: without a heartbeat, until a rank counts as dead.
    collective_timeout: in one operation, for a rank whose heartbeat goes on.
    heartbeat_interval: between two heartbeats.
    init_timeout: at the start, until all ranks have connected; each has to start and to import its packages first.
    """

    heartbeat_timeout: float = 30.0
    collective_timeout: float = 1800.0
    heartbeat_interval: float = 1.0
    init_timeout: float = 1800.0


class Heartbeat:
    """One rank's beats, and what it hears of the others.

    Args:
        store: where the ranks met; the heartbeat makes a connection of its own.

    Attributes:
        problem: why this rank must end; None while all is well.
        deaf: whether the rank stands in an operation that it cannot leave to raise it.
    """

    def __init__(self, store: Store, rank: int, ranks: int, trace: CommTrace, timeouts: Timeouts):
        self.store, self.rank, self.ranks, self.trace, self.timeouts = store.clone(), rank, ranks, trace, timeouts
        self.store.set_timeout(timedelta(seconds=timeouts.heartbeat_timeout))
        self.main = threading.get_ident()
        self.number = 0
        self.heard: dict[int, Beat] = {}
        self.silent = dict.fromkeys(range(ranks), 0.0)  # seconds without a new beat, as this rank has looked
        self.suspected: dict[int, Beat] = {}  # those that seemed stuck, when they first did
        self.looked = self.waited_since = time.monotonic()
        self.waits_in: object = None
        self.problem: CommunicationError | None = None
        self.told, self.found, self.closing = False, threading.Event(), threading.Event()
        self.cut = self.deaf = False
        self.writing = threading.Lock()
        self.beat()
        self.thread = threading.Thread(target=self.run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Once all ranks have met."""
        self.looked = time.monotonic()
        self.thread.start()
        atexit.register(self.leave)

    # In the rank's own thread.

    def wait(self, work: Work) -> None:
        """Wait for an operation of gloo, as long as there is hope.

        Raises:
            CommunicationError: there is none.
        """
        while True:
            ended = work.is_completed()  # asked first: it may end well in the moment after the time is over
            try:
                work.wait(timedelta(seconds=self.timeouts.heartbeat_interval))
                return
            except RuntimeError as error:  # torch has one class for the time that is over and for a connection that broke
                if ended:
                    raise self.cut_off(error) from error
            self.require_hope()

    def cut_off(self, error: Exception) -> CommunicationError:
        """The connection to another rank broke in the operation that this rank waits for: say which rank, if that comes out soon."""
        place, words = self.trace.waiting.place if self.trace.waiting else "an operation", (str(error).splitlines() or [""])[0]
        self.cut = True
        self.found.wait(self.timeouts.heartbeat_timeout)
        self.problem = self.problem or RankStopped(f"rank {self.rank} was cut off from another rank in {place} ({words})")
        self.told = True
        return self.problem

    def require_hope(self) -> None:
        if self.problem is not None:
            self.told = True
            raise self.problem

    def close(self, ended: str) -> None:
        """Say that this rank is not there any more, and stop. ended: what it did, as in "has finished"."""
        if self.closing.is_set():
            return
        self.closing.set()
        self.thread.join(self.timeouts.heartbeat_interval)
        try:
            self.beat(ended)
        except RuntimeError:  # the store is gone as well, and nobody is left to be told
            pass

    def leave(self) -> None:
        """At the interpreter's end. Torch's threads would stay as long as their operations, which may be for ever."""
        self.close(f"stopped: {self.problem}" if self.problem else "has ended")
        if self.problem is not None:
            self.end_process()

    # In the heartbeat's thread.

    def run(self) -> None:
        since = 0.0
        while not self.closing.wait(self.timeouts.heartbeat_interval):
            try:
                self.beat()
                self.listen()
            except RuntimeError as error:
                self.stop(f"the store where the ranks met cannot be reached by rank {self.rank}: the machine of rank 0 is gone ({error})")
            if self.problem is None:
                continue
            since = since or time.monotonic()
            beats = MISSED * self.timeouts.heartbeat_interval
            if not self.told and time.monotonic() - since > (beats if self.deaf else max(beats, LAST_WORDS)):
                print(self.problem, file=sys.stderr)  # the rank stands in an operation that is not ours, or computes
                self.end_process()

    def beat(self, ended: str = "") -> None:
        """Write what this rank does. Nothing is written over its last word: a late beat would be its last one, and it would be missed."""
        with self.writing:
            if self.closing.is_set() and not ended:
                return
            self.number += 1
            text = Beat.of(self.number, self.trace, where_it_stands(self.main), ended).to_json()
            self.store.set(f"beat/{self.rank}", text)

    def listen(self) -> None:
        """Hear everybody's last beat, and think about it."""
        texts = self.store.multi_get([f"beat/{rank}" for rank in range(self.ranks)])
        beats = {rank: Beat.from_json(text) for rank, text in enumerate(texts)}
        now = time.monotonic()
        passed = min(now - self.looked, 2 * self.timeouts.heartbeat_interval)  # this process itself may have been asleep
        self.looked = now
        for rank, beat in beats.items():
            fresh = rank not in self.heard or beat.number > self.heard[rank].number
            self.silent[rank] = 0.0 if fresh or beat.ended else self.silent[rank] + passed
        self.heard = beats
        for sentence in (mismatch(beats), self.stopped(), self.silence(), self.deadlock(), self.too_long(now)):
            if sentence:
                self.stop(sentence)

    def stop(self, sentence: str) -> None:
        if self.problem is None:
            ours = CommunicationError if not sentence.startswith("rank") else RankStopped if sentence == self.stopped() else RankLost
            self.problem = ours(sentence)
            self.found.set()

    def stopped(self) -> str | None:
        """The first rank that ended otherwise than well."""
        return next((f"rank {rank} {beat.ended}" for rank, beat in self.heard.items() if beat.ended.startswith("stopped")), None)

    def silence(self) -> str | None:
        limit = self.timeouts.heartbeat_timeout
        if self.cut:
            limit = min(limit, MISSED * self.timeouts.heartbeat_interval)
        for rank, seconds in self.silent.items():
            if seconds >= limit and rank != self.rank:
                beat = self.heard[rank]
                step = f" (step {beat.step})" if beat.step else ""
                return f"rank {rank} has not been heard of for {seconds:.0f} s: it died or hangs; {beat.called_last()}{step}"
        return None

    def deadlock(self) -> str | None:
        """Ranks that were stuck at one moment: each was in the same state before it and after it."""
        never = stuck(self.heard)
        if not never or any(self.heard[rank].state != self.suspected[rank].state for rank in never if rank in self.suspected):
            self.suspected = {}
        self.suspected = {rank: self.suspected.get(rank, self.heard[rank]) for rank in never}
        sure = never and all(self.heard[rank].number >= beat.number + 2 for rank, beat in self.suspected.items())
        return deadlock(self.heard, never) if sure else None

    def too_long(self, now: float) -> str | None:
        entry = self.trace.waiting
        if entry is not self.waits_in:
            self.waits_in, self.waited_since = entry, now
        if entry is None or now - self.waited_since < self.timeouts.collective_timeout:
            return None
        call = self.heard[self.rank].waiting
        missing = [rank for rank in entry.between if rank != self.rank and not (call and self.heard[rank].begun(call))]
        late = "; ".join(
            f"rank {rank} lives but does not come: {self.heard[rank].called_last()}, {self.heard[rank].stands}" for rank in missing
        )
        return f"rank {self.rank} has waited {now - self.waited_since:.0f} s in {entry.place}: {late or 'all ranks are in it'}"

    def end_process(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_CODE)


def where_it_stands(thread: int) -> str:
    """The innermost line of a thread's code that is neither Python's own nor a package's."""
    frame = innermost = sys._current_frames().get(thread)
    apart = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    while frame is not None and frame.f_code.co_filename.startswith(apart):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its main thread has ended"
    code = frame.f_code
    return f"now in {code.co_name} ({os.path.basename(code.co_filename)}, line {frame.f_lineno})"
