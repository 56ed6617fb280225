"""Ranks that have not met yet: they meet under a fresh prefix, and one that never comes is named while the others wait."""

import re
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from shared.parallel.comm.communicator import CommunicationError
from shared.parallel.processes import rendezvous


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture
def client(store):
    """A connection of another rank."""
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "FIRST", 0.3)
    monkeypatch.setattr(rendezvous, "NEXT", 0.4)


def test_ranks_that_come_within_the_time_share_a_part_of_the_store_and_say_nothing(store, client, capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "FIRST", 15.0)
    found = {}
    other = threading.Thread(target=lambda: found.update(one=rendezvous.fresh_store(client, 1, 2, 20.0)))
    other.start()
    mine = rendezvous.fresh_store(store, 0, 2, 20.0)
    other.join()
    mine.set("key", "of rank 0")
    assert found["one"].get("key") == b"of rank 0" and not store.check(["key"])
    assert "Waiting" not in capsys.readouterr().err


def test_rank_0_names_who_is_missing_more_than_once_and_then_gives_up(store, client, capsys):
    other = threading.Thread(target=rendezvous.fresh_store, args=(client, 1, 3, 20.0))
    other.start()
    with pytest.raises(CommunicationError, match=r"^ranks \[2\] did not connect within 1.5 s"):
        rendezvous.fresh_store(store, 0, 3, 1.5)
    other.join()
    said = capsys.readouterr().err.splitlines()
    line = r"Waiting for ranks \[2\] of 3 to connect: \d s so far, 1.5 at most \(parallel.init_timeout\)[.]"
    assert 2 <= len(said) <= 4 and re.fullmatch(line, said[-1])


def test_another_rank_says_that_it_waits_for_rank_0_and_then_gives_up(client, capsys):
    with pytest.raises(dist.DistError):
        rendezvous.fresh_store(client, 1, 3, 1.5)
    said = capsys.readouterr().err.splitlines()
    assert 2 <= len(said) <= 4 and said[0].startswith("Waiting for rank 0, to which rank 1 of 3 wants to connect: 0 s so far, 1.5 at most")
