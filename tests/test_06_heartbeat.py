"""The heartbeat on a clock of the test's own: what follows from silence and from lateness, to the second."""

import threading

import pytest
import torch

from shared.parallel import heartbeat
from shared.parallel.communicator import OneRank
from shared.parallel.heartbeat import Heartbeat, Patience
from shared.parallel.ledger import Ledger
from shared.parallel.stuck import Beat


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def two_hearts(monkeypatch, patience: Patience) -> tuple[Clock, Heartbeat, Heartbeat]:
    """Of two ranks, of which rank 0 waits in a barrier and rank 1 has called nothing. Nothing beats by itself."""
    clock, store = Clock(), torch.distributed.HashStore()
    monkeypatch.setattr(heartbeat, "time", clock)
    hearts = [Heartbeat(store, rank, 2, Ledger(), patience) for rank in range(2)]
    group = OneRank(ledger=hearts[0].ledger)
    group.members = (0, 1)
    hearts[0].ledger.waiting = hearts[0].ledger.opened("barrier", group, 0, None, listed=True)
    return clock, *hearts


def test_lateness_is_no_silence(monkeypatch):
    clock, waits, works = two_hearts(monkeypatch, Patience(timeout=2.0, longest_wait=60.0, every=0.5))
    for tick in range(1, 140):
        clock.now = tick / 2
        waits.beat(), works.beat(), waits.listen(), works.listen()
        if waits.problem is not None:
            break
    assert works.problem is None and str(waits.problem).startswith("rank 0 has waited 60 s in barrier #0 of world: rank 1 lives")


def test_silence_is_counted_in_looks_so_that_whoever_slept_accuses_nobody(monkeypatch):
    clock, waits, _ = two_hearts(monkeypatch, Patience(timeout=2.0, longest_wait=60.0, every=0.5))
    waits.beat(), waits.listen()
    clock.now += 30.0  # this rank's own process was asleep, or all of the machine
    waits.beat(), waits.listen()
    assert waits.problem is None
    for _ in range(2):
        clock.now += 0.5
        waits.beat(), waits.listen()
    assert str(waits.problem).startswith("rank 1 has not been heard of for 2 s")


class Board:
    """A store in this process, with a clock that the test moves. `on_set` is called before something is written."""

    def __init__(self):
        self.written, self.on_set, self.now = {}, lambda text: None, 0.0
        self.clone, self.set_timeout, self.monotonic = lambda: self, lambda time: None, lambda: self.now

    def set(self, key, text):
        self.on_set(text)
        self.written[key] = text

    def multi_get(self, keys):
        return [self.written[key] for key in keys]


@pytest.fixture
def hearts_on_a_board(monkeypatch):
    """Of ranks 0 and 1, whose threads are not started, and where they write."""
    board = Board()
    monkeypatch.setattr("shared.parallel.heartbeat.time", board)
    return [Heartbeat(board, rank, 2, Ledger(), Patience()) for rank in (0, 1)], board


def listen(heart, board, seconds):
    for _ in range(seconds):
        board.now += 1.0
        heart.beat()
        heart.listen()


def test_a_rank_that_has_finished_is_not_missed_and_one_that_fell_silent_is(hearts_on_a_board):
    (stays, leaves), board = hearts_on_a_board
    listen(stays, board, 29)  # a moment before rank 1 would be given up
    assert stays.problem is None
    leaves.beat("has finished")
    stays.cut = True  # as where the connections of the rank that left are closed
    listen(stays, board, 100)
    assert stays.problem is None
    leaves.beat()
    listen(stays, board, 31)
    assert str(stays.problem).startswith("rank 1 has not been heard of for 3 s")


def test_nothing_is_heard_of_a_rank_after_its_last_word(hearts_on_a_board):
    """Its thread may be late: in the middle of a beat when the rank leaves, or with one beat more to come."""
    (stays, leaves), board = hearts_on_a_board
    leaves.thread.join = lambda seconds: None  # not waited for any longer
    closer, last_word = threading.Thread(target=leaves.close, args=["has finished"]), threading.Event()

    def in_the_middle(text):
        if "has finished" in text:
            last_word.set()
        elif not leaves.closing.is_set():
            closer.start()
            leaves.closing.wait()
            last_word.wait(0.1)  # comes if it can, and must not come before what is being written

    board.on_set = in_the_middle
    leaves.beat()
    closer.join()
    leaves.beat()
    board.on_set = lambda text: None
    assert Beat.from_json(board.written["beat/1"]).ended == "has finished"
    listen(stays, board, 100)
    assert stays.problem is None
