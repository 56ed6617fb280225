"""The heartbeat on a clock of the test's own: what follows from silence and from lateness, to the second."""

import re
import threading
import time

import torch

from shared.parallel.health import heartbeat
from shared.parallel.comm.communicator import RankStopped, SingleRankCommunicator
from shared.parallel.health.heartbeat import Heartbeat, Timeouts
from shared.parallel.comm.trace import CommTrace


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def two_hearts(monkeypatch, timeouts: Timeouts) -> tuple[Clock, Heartbeat, Heartbeat]:
    """Of two ranks, of which rank 0 waits in a barrier and rank 1 has called nothing. Nothing beats by itself."""
    clock, store = Clock(), torch.distributed.HashStore()
    monkeypatch.setattr(heartbeat, "time", clock)
    hearts = [Heartbeat(store, rank, 2, CommTrace(), timeouts) for rank in range(2)]
    group = SingleRankCommunicator(trace=hearts[0].trace)
    group.members = (0, 1)
    hearts[0].trace.waiting = group.entry("barrier", 0)
    hearts[0].trace.record(hearts[0].trace.waiting, is_traffic=True)
    return clock, *hearts


def test_a_late_heartbeat_is_not_a_lost_rank(monkeypatch):
    clock, waits, works = two_hearts(monkeypatch, Timeouts(heartbeat_timeout=2.0, collective_timeout=60.0, heartbeat_interval=0.5))
    for tick in range(1, 140):
        clock.now = tick / 2
        waits.send(), works.send(), waits.check(), works.check()
        if waits.problem is not None:
            break
    assert works.problem is None and str(waits.problem).startswith("rank 0 has waited 60 s in barrier #0 of world: rank 1 is alive")


def test_a_watcher_that_was_suspended_reports_no_lost_heartbeat(monkeypatch):
    clock, waits, _ = two_hearts(monkeypatch, Timeouts(heartbeat_timeout=2.0, collective_timeout=60.0, heartbeat_interval=0.5))
    waits.send(), waits.check()
    clock.now += 30.0  # this rank's own process was asleep, or all of the machine
    waits.send(), waits.check()
    assert waits.problem is None
    for _ in range(2):
        clock.now += 0.5
        waits.send(), waits.check()
    assert str(waits.problem).startswith("rank 1 has sent no heartbeat for 2 s")


def test_a_silent_rank_is_named_with_what_it_did_last(monkeypatch):
    clock, waits, hangs = two_hearts(monkeypatch, Timeouts(heartbeat_timeout=6.0, collective_timeout=600.0, heartbeat_interval=0.5))
    hangs.trace.record(SingleRankCommunicator(trace=hangs.trace).entry("barrier", 0), is_traffic=True)
    hangs.send(), waits.check()
    while clock.now < 6.0:
        assert waits.problem is None
        clock.now += 0.5
        waits.check()
    sentence = "rank 1 has sent no heartbeat for 6 s: it died, hangs or cannot be reached; its last operation was barrier #0 of world"
    assert str(waits.problem) == sentence


def test_a_rank_that_lives_and_does_not_join_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(heartbeat, "code_location", lambda thread: "now in asleep (script.py, line 7)")
    clock, waits, sleeps = two_hearts(monkeypatch, Timeouts(heartbeat_timeout=120.0, collective_timeout=2.0, heartbeat_interval=0.5))
    waits.send(), waits.check()
    for _ in range(4):
        assert waits.problem is None
        clock.now += 0.5
        waits.send(), sleeps.send(), waits.check()
    place = "it has not started any operation, now in asleep (script.py, line 7)"
    assert str(waits.problem) == f"rank 0 has waited 2 s in barrier #0 of world: rank 1 is alive and has not joined: {place}"


def test_the_last_message_of_a_rank_outlives_its_heartbeat_and_the_interpreters_exit(monkeypatch):
    """A rank that stopped says with what, and its interpreter ends soon after: the others must still find the cause."""
    _, waits, works = two_hearts(monkeypatch, Timeouts())
    works.thread.start()
    works.close("stopped: KeyError: the cause")
    works.at_exit()
    waits.check()
    assert waits.last_seen[1].ended == "stopped: KeyError: the cause"


def test_a_rank_that_has_finished_is_not_missed_and_one_that_fell_silent_is(monkeypatch):
    clock, waits, works = two_hearts(monkeypatch, Timeouts())
    waits.trace.waiting = None  # there is nothing that it needs the other one for

    def listen(seconds):
        for _ in range(seconds):
            clock.now += 1.0
            waits.send(), waits.check()

    listen(29)  # a moment before rank 1 would be given up
    works.send("has finished")
    waits.connection_lost = True  # as where the connections of the rank that left are closed
    listen(100)
    assert waits.problem is None
    works.send()
    listen(5)
    assert str(waits.problem).startswith("rank 1 has sent no heartbeat for 3 s")


class Slow:
    """A store in which `set` returns when the test lets it."""

    def __init__(self, store):
        self.store, self.entered, self.answers = store, threading.Event(), threading.Event()

    def set(self, key, text):
        self.entered.set()
        self.answers.wait()
        self.store.set(key, text)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_the_last_message_waits_for_one_that_is_being_written(monkeypatch):
    """A rank may leave while its heartbeat's thread is in the middle of a message."""
    _, waits, works = two_hearts(monkeypatch, Timeouts(heartbeat_interval=0.01))
    works.store = Slow(works.store)
    works.thread.start()
    works.store.entered.wait()
    closer = threading.Thread(target=works.close, args=["has finished"])
    closer.start()
    works.closing.wait()
    works.store.answers.set()
    closer.join()
    waits.check()
    assert waits.last_seen[1].ended == "has finished"


def test_a_store_that_does_not_answer_is_named_in_time_and_ends_the_process(monkeypatch):
    """As where the network is cut: the call returns when the kernel gives the connection up, after 15 minutes."""
    ended, over = [], threading.Event()
    monkeypatch.setattr(heartbeat, "end_process", lambda reason="": (ended.append(str(reason)), over.set()))
    heart = Heartbeat(torch.distributed.HashStore(), 1, 2, CommTrace(), Timeouts(heartbeat_timeout=0.5, heartbeat_interval=0.02))
    heart.blocked, heart.store = True, Slow(heart.store)  # its own thread is in an operation that cannot be interrupted
    heart.thread.start(), heart.watchdog.start()
    assert over.wait(60), "the watchdog waits for the store as well"
    assert re.match(r"rank 1 has had no answer from the machine of rank 0 for \d+ s: it is gone, hangs or cannot be reached", ended[0])
    began = time.monotonic()
    heart.close("stopped")
    assert time.monotonic() - began < heartbeat.RAISE_GRACE, "a rank that leaves waits for the store"
    heart.store.answers.set()


def test_a_rank_that_raised_the_problem_and_does_not_end_is_ended(monkeypatch):
    ended, over = [], threading.Event()
    monkeypatch.setattr(heartbeat, "end_process", lambda reason="": (ended.append(str(reason)), over.set()))
    monkeypatch.setattr(heartbeat, "END_GRACE", 0.2)
    heart = Heartbeat(torch.distributed.HashStore(), 1, 2, CommTrace(), Timeouts(heartbeat_interval=0.02))
    heart.fail(RankStopped("rank 0 stopped"))
    heart.raised = True
    heart.watchdog.start()
    assert over.wait(60) and ended[0] == "rank 0 stopped"
    heart.closing.set()


class Ticks:
    """In place of the event that ends a heartbeat's threads: time passes in steps of the test's own, and then the threads end."""

    def __init__(self, clock: Clock, *seconds: float):
        self.clock, self.seconds = clock, list(seconds)

    def wait(self, interval: float | None = None) -> bool:
        if not self.seconds:
            return True
        self.clock.now += self.seconds.pop(0)
        return False


def test_a_watchdog_that_was_suspended_does_not_miss_the_store(monkeypatch):
    clock, heart, _ = two_hearts(monkeypatch, Timeouts(heartbeat_timeout=2.5, collective_timeout=60.0, heartbeat_interval=0.5))
    monkeypatch.setattr(heartbeat, "end_process", lambda reason="": None)
    heart.closing = Ticks(clock, 0.5, 30.0, 0.5)
    heart.watch()
    assert heart.problem is None
    heart.closing = Ticks(clock, 0.5, 0.5)
    heart.watch()
    assert str(heart.problem).startswith("rank 0 has had no answer from the machine of rank 0 for 2 s")


def test_an_answer_of_the_store_ends_its_silence(monkeypatch):
    clock, heart, _ = two_hearts(monkeypatch, Timeouts(heartbeat_timeout=2.5, collective_timeout=60.0, heartbeat_interval=0.5))
    heart.unanswered_seconds, heart.closing = 2.4, Ticks(clock, 0.5)
    heart.run()
    assert heart.unanswered_seconds == 0.0
