"""The heartbeat on a clock of the test's own: what follows from silence and from lateness, to the second."""

import threading

import torch

from shared.parallel.health import heartbeat
from shared.parallel.comm.communicator import SingleRankCommunicator
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
    hearts[0].trace.waiting = hearts[0].trace.record("barrier", group, 0, None, is_traffic=True)
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


def test_the_last_beat_is_not_taken_back_by_one_that_was_under_way(monkeypatch):
    _, waits, works = two_hearts(monkeypatch, Timeouts())
    works.thread = threading.Thread(target=works.run)
    works.thread.start()
    works.close("has finished")
    works.send()
    waits.check()
    assert waits.last_seen[1].ended == "has finished"


def test_a_reported_cause_outlives_the_interpreters_exit(monkeypatch):
    """A rank that stopped says with what, and its interpreter ends soon after: the others must still find the cause."""
    _, waits, works = two_hearts(monkeypatch, Timeouts())
    works.thread.join = lambda seconds: None
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


def test_the_last_beat_waits_for_one_that_is_being_written(monkeypatch):
    """A rank may leave while its heartbeat's thread is in the middle of a beat, and not wait long for that thread."""
    _, waits, works = two_hearts(monkeypatch, Timeouts())
    closer, last_beat, set_it = threading.Thread(target=works.close, args=["has finished"]), threading.Event(), works.store.set
    works.thread.join = lambda seconds: None

    def in_the_middle(key, text):
        is_last = "has finished" in text
        if not is_last:
            closer.start()
            works.closing.wait()
            last_beat.wait(0.2)  # comes if it can
        set_it(key, text)
        if is_last:
            last_beat.set()

    class Store:
        set = staticmethod(in_the_middle)

    works.store = Store()
    works.send()
    closer.join()
    waits.check()
    assert waits.last_seen[1].ended == "has finished"
