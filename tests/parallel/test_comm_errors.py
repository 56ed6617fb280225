"""What ranks may not say to each other, and what happens when they do, when one fails or is gone: a sentence, and nobody left."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from shared.parallel.processes import launch, torchrun as processes
from shared.parallel.comm.communicator import CommunicationError, RankStopped
from shared.parallel.health.heartbeat import EXIT_CODE, Timeouts
from shared.parallel.processes.launch import run_processes
from shared.parallel.comm.threads import run_threads

in_both = pytest.mark.parametrize("run", [run_threads, run_processes], ids=["threads", "processes"])
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that ranks need not import pytest


def across() -> torch.Tensor:
    """Six numbers that do not lie one behind the other."""
    return torch.zeros(3, 2).t()


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda world: world.all_reduce(across()), "not contiguous"),
        (lambda world: world.broadcast(across(), 0), "not contiguous"),
        (lambda world: world.send(across(), 1 - world.rank), "not contiguous"),
        (lambda world: world.receive(across(), 1 - world.rank), "not contiguous"),
        (lambda world: world.all_gather(torch.zeros(12), across()), "not contiguous"),
        (lambda world: world.all_gather(across(), torch.zeros(3)), "not contiguous"),
        (lambda world: world.reduce_scatter(across(), torch.zeros(12)), "not contiguous"),
        (lambda world: world.reduce_scatter(torch.zeros(3), across()), "not contiguous"),
        (lambda world: world.all_to_all([across()] * 2, [torch.zeros(6)] * 2), "not contiguous"),
        (lambda world: world.all_to_all([torch.zeros(6)] * 2, [across()] * 2), "not contiguous"),
        (lambda world: world.broadcast(torch.zeros(1), 2), "no rank 2 in the group 'world' of 2"),
        (lambda world: world.send(torch.zeros(1), world.rank), "is this rank itself"),
        (lambda world: world.receive(torch.zeros(1), -1), "no rank -1"),
        (lambda world: world.all_gather(torch.zeros(5), torch.zeros(2)), "must be 2 times as many"),
        (
            lambda world: world.reduce_scatter(torch.zeros(2), torch.zeros(4, dtype=torch.int64)),
            "full tensor is int64 and a shard float32: they must have one dtype",
        ),
        (lambda world: world.all_to_all([torch.zeros(1)], [torch.zeros(1)]), "give 2 tensors to send"),
        (lambda world: world.all_to_all([torch.zeros(1)] * 2, [torch.zeros(1), torch.zeros(1).int()]), "several dtypes"),
        (lambda world: world.split("dp", [(0,)]), "must hold each rank of the world once"),
        (lambda world: world.split("dp", [(0, 1), (1,)]), "must hold each rank of the world once"),
        (lambda world: world.split("dp", [(0, 1)]).split("tp", [(0, 1)]), "only the world is split"),
        (lambda world: world.gather_objects(torch.zeros(1)), "not JSON serializable"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        run_threads(call, 2)


def mismatch(world):
    tensor = torch.zeros(4)
    if world.rank == 1:
        world.all_gather(torch.zeros(8), tensor)
    else:
        world.all_reduce(tensor)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (mismatch, r"mismatch: in operation #1 of world, .*all_reduce\(sum\) of float32 \(4,\).*|.*all_gather of float32 \(4,\)"),
        (lambda world: world.all_reduce(torch.zeros(2 + world.rank)), r"of float32 \(2,\).*of float32 \(3,\)|\(3,\).*\(2,\)"),
        (lambda world: world.broadcast(torch.zeros(2), world.rank), r"broadcast\(from 0\).*broadcast\(from 1\)|from 1.*from 0"),
        (lambda world: world.split(f"axis{world.rank}", [(0, 1)]), "split into axis0"),
        (lambda world: world.rank or world.barrier(), "deadlock: rank 0 waits in barrier #1 of world; rank 1 has finished"),
        (
            lambda world: world.send(torch.zeros(1), 1 - world.rank),
            "deadlock: rank 0 waits in send to rank 1; rank 1 waits in send to rank 0",
        ),
        (lambda world: world.receive(torch.zeros(1), 1 - world.rank), "rank 1 waits in receive from rank 0"),
        (
            lambda world: world.send(torch.zeros(2), 1) if world.rank == 0 else world.receive(torch.zeros(3), 0),
            "mismatch: in receive, rank 1 expects 3 numbers of float32 from rank 0, which sends 2",
        ),
        (
            lambda world: world.all_to_all([torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1 + world.rank)]),
            "mismatch: in all_to_all, rank 1 expects 1 numbers of float32 from rank 1, which sends 2",
        ),
        (lambda world: world.all_reduce(torch.zeros(1), asynchronous=True) and None, "ended without waiting for all_reduce #1 of world"),
    ],
)
def test_threads_name_what_does_not_match_at_once(call, sentence):
    with pytest.raises(CommunicationError, match=sentence):
        run_threads(call, 2)  # which has no limit of time: it ends when the ranks do
    assert not [each for each in threading.enumerate() if each.name.startswith("rank ")]


def test_a_deadlock_over_two_groups_is_named():
    def call(world):
        rows, columns = world.split("row", [(0, 1), (2, 3)]), world.split("column", [(0, 2), (1, 3)])
        (rows if world.rank in (0, 3) else columns).barrier()

    with pytest.raises(
        CommunicationError, match="deadlock: rank 0 waits in barrier #1 of row; rank 1 waits in barrier #1 of column; rank 2"
    ):
        run_threads(call, 4)


class Private(Exception):
    """One that cannot be made from its message alone."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail(world):
    if world.rank == 1:
        raise KeyError("broken on purpose")
    world.barrier()


@in_both
def test_a_ranks_error_is_raised_here_and_names_the_rank(run):
    with pytest.raises(KeyError, match="broken on purpose") as caught:
        run(fail, 2)
    assert any("on rank 1 of 2" in note for note in caught.value.__notes__)
    if run is run_processes:
        assert "in fail" in caught.value.__notes__[0], "with its traceback there"


def end(world):
    print("last words")
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def send_to_a_dead_rank(world):
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until gloo has seen that the connection is closed, and refuses to send
        world.send(torch.ones(3), to=1, asynchronous=True)
        time.sleep(0.1)


def test_a_send_that_cannot_start_names_the_dead_rank(monkeypatch):
    """gloo raises in the call itself, before there is anything to wait for."""
    monkeypatch.setattr(launch, "GRACE", 120.0)  # until rank 0 has answered too
    with pytest.raises(CommunicationError, match="^rank 1 of 2 ended with signal SIGKILL|^rank 1 has sent no heartbeat"):
        run_processes(send_to_a_dead_rank, 2)


def sleep(world):
    if world.rank == 1:
        time.sleep(10**6)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (end, "rank 0 of 2 ended with signal SIGKILL"),
        (lambda world: world.rank or os._exit(3), "rank 0 of 2 ended with exit code 3"),
        (lambda world: world.all_reduce(torch.zeros(1), asynchronous=True) and None, "ended without waiting for all_reduce #1 of world"),
    ],
)
def test_processes_that_end_are_named_and_none_is_left(call, sentence, capsys):
    with pytest.raises(CommunicationError, match=sentence):
        run_processes(call, 2)
    assert not left_over()
    if call is end:
        assert "rank 0: last words\n" in capsys.readouterr().out


def left_over() -> list:
    return [child for child in multiprocessing.active_children() if child.name.startswith("rank")]


def test_processes_that_stay_are_named_and_none_is_left(monkeypatch):
    """The time is over when the other rank has answered: on a clock of the test's own, so that no machine is too slow for it."""
    clock, wait = SimpleNamespace(now=0.0), launch.wait

    def wait_or_be_over(connections, seconds):
        if len(connections) == 1:
            assert len(left_over()) == 2, "the control: they are seen while they are there"
            clock.now += seconds
            return []
        return wait(connections)

    monkeypatch.setattr(launch, "wait", wait_or_be_over)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with pytest.raises(CommunicationError, match="rank 1 of 2 did not end within 7 s, and all were stopped"):
        run_processes(sleep, 2, timeout=7)
    assert not left_over()


def whose_cause_is_slow(world):
    """Rank 1 is told that rank 0 has failed, and answers, long before rank 0 has sent with what."""
    if world.rank == 0:
        raise Slow
    world.barrier()


class Slow(Exception):
    """One that takes a second to pack, as on a machine that is busy elsewhere."""

    def __reduce__(self):
        time.sleep(1.0)
        return Slow, ()


def test_the_cause_is_waited_for():
    with pytest.raises(Slow):
        run_processes(whose_cause_is_slow, 2)


def test_a_rank_that_could_not_connect_is_not_the_cause(monkeypatch, tmp_path):
    """The other rank had its connections, worked, failed, and was gone before this one had its own."""

    def cut_off(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(processes, "rendezvous", lambda *_, **__: iter([(torch.distributed.HashStore(), 0, 2)]))
    monkeypatch.setattr(processes, "fresh_store", lambda store, *_: store)
    monkeypatch.setattr(processes.dist, "init_process_group", cut_off)
    with pytest.raises(RankStopped, match="rank 0 of 2 could not connect to the others: Connection closed by peer") as stopped:
        processes.join_world(0, 2, "", torch.device("cpu"), Timeouts())
    with pytest.raises(KeyError, match="the cause"):
        launch.results_of({0: (None, stopped.value), 1: (None, KeyError("the cause"))}, [0, 0], 1.0, tmp_path)


def test_a_connection_that_torchs_own_engine_loses_is_named_by_the_heartbeat():
    """DDP waits for its operations itself, and raises an error of gloo that names nobody; `test_two_machines.py` has a real one."""
    world = object.__new__(processes.ProcessCommunicator)
    world.process = SimpleNamespace(heartbeat=SimpleNamespace(connection_error=lambda error: CommunicationError("rank 1 has sent none")))
    lost = "Got the following error when running the callback: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
    for message, kind in ((lost, CommunicationError), ("mat1 and mat2 shapes cannot be multiplied", RuntimeError)):
        with pytest.raises(kind) as raised, processes.broken_connections_named(world):
            raise RuntimeError(message)
        assert type(raised.value) is kind
    with pytest.raises(RuntimeError, match="gloo"), processes.broken_connections_named(SimpleNamespace()):
        raise RuntimeError(lost)


def test_the_first_failed_rank_is_named_not_those_that_followed(tmp_path):
    with pytest.raises(CommunicationError, match="^rank 1 of 2 ended with signal SIGKILL$"):
        launch.results_of({0: None, 1: None}, [EXIT_CODE, -signal.SIGKILL], 1.0, tmp_path)
    with pytest.raises(CommunicationError, match=f"^rank 0 of 2 ended with exit code {EXIT_CODE}; rank 1"):
        launch.results_of({0: None, 1: None}, [EXIT_CODE, EXIT_CODE], 1.0, tmp_path)


def test_exceptions_and_results_that_cannot_be_sent_still_arrive():
    def private(world):
        raise Private(1, 2)

    with pytest.raises(Exception, match="Private: 1 and 2"):
        run_processes(private, 2)
    with pytest.raises(Exception, match="cannot pickle|pickle"):
        run_processes(lambda world: threading.Lock(), 2)


def test_processes_print_in_the_parent_in_rank_order(capsys):
    local = 7

    def call(world):
        print("begins")
        time.sleep(0.1 * (world.size - world.rank))
        print("ends", local)
        return torch.is_grad_enabled(), torch.get_num_threads()

    assert run_processes(call, 2) == [(True, 1)] * 2
    assert capsys.readouterr().out == "rank 0: begins\nrank 0: ends 7\nrank 1: begins\nrank 1: ends 7\n"


def test_a_torch_that_sorts_a_groups_ranks_is_given_none_in_another_order(monkeypatch):
    """torch 2.11 has no `sort_ranks`. The groups of a mesh are in ascending order, which it keeps."""
    made = []
    monkeypatch.setattr(processes, "KEEP_ORDER", {})
    monkeypatch.setattr(processes.dist, "new_group", lambda ranks, timeout, **options: made.append((ranks, options)))
    world = SimpleNamespace(process=SimpleNamespace(timeout=timedelta(seconds=1), device=torch.device("cpu")))
    processes.ProcessCommunicator.new_group(world, "tp", (0, 2))
    assert made == [([0, 2], {"group_desc": "tp"})]
    with pytest.raises(ValueError, match=r"would sort the ranks \[2, 0\] of the group 'tp'"):
        processes.ProcessCommunicator.new_group(world, "tp", (2, 0))
