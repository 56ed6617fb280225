"""What happens when a rank dies, hangs, goes elsewhere or holds other weights: who is named, how soon, and how the run goes on."""

import copy
import os
import re
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
from fault_table import RUNS, run_fault
from parallel_script import make_model, parsed, train

from shared.parallel.comm.communicator import CommunicationError
from shared.parallel.health.heartbeat import Timeouts, code_location
from shared.parallel.processes.launch import run_processes
from shared.parallel.comm.trace import CommTrace, TraceEntry
from shared.parallel.health.replicas import ReplicasDiffer, checksum, require_equal
from shared.parallel.held import placement
from shared.model.sharding import whole_region
from shared.parallel.comm.deadlock import HeartbeatMessage, deadlocked_ranks, describe_deadlock, find_mismatch
from shared.parallel.comm.threads import run_threads

LONG_TIMEOUTS = Timeouts(120.0, 600.0, heartbeat_interval=0.2)  # a rank of a busy machine is not taken for dead
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that ranks need not import pytest

# What follows from beats, without processes.


def call(operation="all_reduce", number=1, ranks=(0, 1), bytes=8, split=0, point_to_point=False):
    axis, peer = "world" if split == 0 else str(split), ranks[1] if point_to_point else None
    return TraceEntry(operation, axis, bytes, len(ranks), number=number, peer=peer, split_number=split, ranks=ranks)


def beat(waiting=None, *begun, ended=""):
    return HeartbeatMessage(1, waiting=waiting, recent=[[each] for each in ([waiting] if waiting else []) + list(begun)], ended=ended)


def test_a_rank_that_is_at_work_keeps_everybody_who_waits_for_it_free():
    beats = {0: beat(call(ranks=(0, 1))), 1: beat(call(split=2, ranks=(1, 2))), 2: beat()}
    assert deadlocked_ranks(beats) == []
    assert deadlocked_ranks(beats | {2: beat(ended="has finished")}) == [0, 1]
    assert deadlocked_ranks(beats | {2: beat(call(split=3, ranks=(0, 2)))}) == [0, 1, 2]


def test_ranks_in_one_operation_are_not_stuck_however_long_it_takes():
    assert deadlocked_ranks({rank: beat(call()) for rank in (0, 1)}) == []
    begun_and_gone_on = beat(call(split=5), call(number=3))
    assert deadlocked_ranks({0: beat(call(number=2)), 1: begun_and_gone_on}) == [], "what rank 0 waits for has begun, so it comes out"
    assert deadlocked_ranks({0: beat(call(number=4)), 1: begun_and_gone_on}) == [0, 1]


def test_two_can_be_stuck_while_a_third_works():
    beats = {0: beat(call(split=1, ranks=(0, 1))), 1: beat(call(split=2, ranks=(0, 1))), 2: beat()}
    assert deadlocked_ranks(beats) == [0, 1]
    assert describe_deadlock(beats, [0, 1]) == "deadlock: rank 0 waits in all_reduce #1 of 1; rank 1 waits in all_reduce #1 of 2"


def test_sends_and_receives_meet_by_number():
    sent = call("send", 2, (0, 1), point_to_point=True)
    received = [call("receive", number, (0, 1), point_to_point=True) for number in (1, 2)]
    assert deadlocked_ranks({0: beat(sent), 1: beat(call(split=4), received[1])}) == []
    assert deadlocked_ranks({0: beat(sent), 1: beat(call(split=4), received[0])}) == [0, 1]


@pytest.mark.parametrize(
    "mine, theirs, differs",
    [
        (call("all_reduce"), call("all_gather"), True),
        (call(bytes=8), call(bytes=16), True),
        (call(number=1), call(number=2, bytes=16), False),
        (call("gather_objects", bytes=8), call("gather_objects", bytes=16), False),
        (call("gather_objects", bytes=8), call("all_to_all", bytes=16), True),
        (call("send", point_to_point=True), call("receive", point_to_point=True), False),
        (call("send", point_to_point=True), call("receive", point_to_point=True, bytes=9), True),
        (call(split=1), call("all_gather", split=2), False),
    ],
)
def test_calls_that_had_to_be_the_same_are_compared(mine, theirs, differs):
    found = find_mismatch({0: beat(None, mine), 1: beat(None, theirs)})
    assert bool(found) == differs
    if differs:
        assert "rank 0 calls " + mine.operation in found and "rank 1 calls " + theirs.operation in found


def test_a_beat_comes_through_json_and_has_what_the_ledger_has():
    def both(world):
        world.all_reduce(torch.zeros(3))
        world.send(torch.zeros(2), 1) if world.rank == 0 else world.receive(torch.zeros(2), 0)
        world.trace.step = 7
        return HeartbeatMessage.of(4, world.trace, "here")

    first, second = run_threads(both, 2)
    assert HeartbeatMessage.from_json(first.to_json()) == first and (first.step, first.last) == (7, "send to rank 1")
    assert find_mismatch({0: first, 1: second}) is None and [route[-1].key for route in first.recent] == [
        route[-1].key for route in second.recent
    ]
    assert HeartbeatMessage.of(1, CommTrace(), "").last_call() == "it has not started any operation"


def test_code_location_is_a_line_of_the_ranks_own_code():
    def waits_here():
        asleep.wait()

    asleep = threading.Event()
    thread = threading.Thread(target=waits_here, daemon=True)
    thread.start()
    while "waits_here" not in code_location(thread.ident):
        time.sleep(0.01)
    assert re.fullmatch(r"now in waits_here \(test_faults.py, line \d+\)", code_location(thread.ident))
    asleep.set()
    thread.join()
    assert code_location(thread.ident) == "its main thread has ended"


# Replicas.


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))


@pytest.mark.parametrize("ranks, wrong, sentence", [
    (2, [1], "after step 8, the weights of rank 1 differ from the weights of rank 0; the first parameter that differs is 1.weight"),
    (3, [0], "the weights of rank 0 differ from the weights of ranks 1, 2; "),
    (4, [1, 3], "the weights of ranks 1, 3 differ from the weights of ranks 0, 2; "),
])  # fmt: skip
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_in_one_weight_is_caught_and_its_rank_is_named(ranks, wrong, sentence, kind):
    original = two_layers().to(kind)

    def compare(world, nudged):
        model = copy.deepcopy(original)
        if world.rank in nudged:
            with torch.no_grad():
                model[1].weight[1, 2] = torch.nextafter(model[1].weight[1, 2], torch.tensor(9.0, dtype=kind))
        weights = dict(model.named_parameters())
        (holders,) = placement(world, ({name: whole_region(tensor.shape) for name, tensor in weights.items()}, {}))
        require_equal(weights, holders, world, step=8)

    run_threads(compare, ranks, [])
    with pytest.raises(ReplicasDiffer, match=sentence):
        run_threads(compare, ranks, wrong)


def test_a_checksum_sees_rows_that_changed_places_and_any_shape():
    tensor = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert checksum(tensor) != checksum(tensor[[1, 0, 2, 3]])
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0)), "bits are compared, not numbers"
    assert checksum(torch.arange(9.0)[1:]) == checksum(torch.arange(1.0, 9.0)), "a shard may begin between two whole numbers of 8 bytes"
    assert checksum(torch.zeros(0)) == 0 and checksum(torch.full((2, 2), torch.nan)).dtype == torch.int64


# With processes.


def groups(world):
    first, second = world.split("first", [(0, 1)]), world.split("second", [(0, 1)])
    (second if world.rank else first).barrier()


def sizes(world):
    world.all_reduce(torch.zeros(10_000 if world.rank else 20_000))
    world.barrier()


def silent(world):
    world.barrier()
    if world.rank:
        wait_for_beats(world, 2)  # so that the last one tells of the barrier
        os.kill(os.getpid(), signal.SIGSTOP)
    world.barrier()


def wait_for_beats(world, count):
    until = world.process.heartbeat.number + count
    while world.process.heartbeat.number < until:
        time.sleep(0.01)


def kinds(world):
    (world.barrier if world.rank else lambda: world.all_reduce(torch.zeros(2)))()


@pytest.mark.parametrize(
    "function, sentence",
    [
        (groups, "deadlock: rank 0 waits in barrier #1 of first; rank 1 waits in barrier #1 of second"),
        (lambda world: world.rank or world.barrier(), "deadlock: rank 0 waits in barrier #1 of world; rank 1 has finished"),
        (lambda world: world.receive(torch.zeros(1), 1 - world.rank), "rank 0 waits in receive from rank 1; rank 1 waits in receive"),
        (kinds, r"mismatch: in operation #1 of world, rank 0 calls all_reduce\(sum\) of float32 \(2,\); rank 1 calls barrier"),
        (sizes, r"mismatch: in operation #1 of world, rank 0 calls .*\(20000,\); rank 1 calls .*\(10000,\)|ended with signal SIGABRT"),
    ],
)
def test_deadlocks_and_mismatches_of_processes_are_reported(function, sentence):
    with pytest.raises(CommunicationError, match=sentence):
        run_processes(function, 2, timeout=300, timeouts=LONG_TIMEOUTS)


@pytest.mark.slow  # waits by the clock; `test_heartbeat.py` has its sentence on a clock of its own
def test_a_process_that_hangs_is_named_with_what_it_did_last():
    """It beats twice and stops, so it has no time to miss the other one's beats, however slow the machine is.
    Six seconds, because a busy machine has kept the store silent for two."""
    sentence = "rank 1 has sent no heartbeat for 6 s: it died, hangs or cannot be reached; its last operation was barrier #1 of world"
    with pytest.raises(CommunicationError, match=sentence):
        run_processes(silent, 2, timeout=300, timeouts=Timeouts(6.0, 600.0, 0.2))


def late(world):
    if world.rank == 0:
        wait_for_beats(world, 5)  # more than it takes to be sure of a deadlock
    world.barrier()
    return world.rank


def test_a_rank_that_is_late_and_lives_is_waited_for():
    assert run_processes(late, 2, timeouts=LONG_TIMEOUTS) == [0, 1]


def asleep(world):
    if world.rank:
        time.sleep(10**6)
    other = world.process.heartbeat.last_seen
    while 1 not in other or "in asleep" not in other[1].location:
        time.sleep(0.01)
        other = world.process.heartbeat.last_seen
    world.barrier()


@pytest.mark.slow  # as above
def test_a_hanging_rank_is_named_with_its_line():
    where = r"it has not started any operation, now in asleep \(test_faults.py, line \d+\)"
    sentence = r"rank 0 has waited \d+ s in barrier #1 of world: rank 1 is alive and has not joined: " + where
    with pytest.raises(CommunicationError, match=sentence):
        run_processes(asleep, 2, timeout=300, timeouts=Timeouts(120.0, 2.0, 0.2))


def test_a_run_with_a_killed_rank_restarts_to_the_same_weights(tmp_path):
    """It breaks as processes and goes on as threads, beside one that never broke."""
    broken, whole = parsed([str(tmp_path / "broken"), "--fault", "kill"]), parsed([str(tmp_path / "whole")])
    model = make_model()
    run = lambda world, options: train(world, options, copy.deepcopy(model))  # noqa: E731
    with pytest.raises(CommunicationError, match="rank 1 of 2 ended with signal SIGKILL"):
        run_processes(run, 2, broken)
    assert [path.name for path in sorted((tmp_path / "broken" / "checkpoints").iterdir())] == ["step-00000002"]
    went_on, never_broke = run_threads(run, 2, broken), run_threads(run, 2, whole)
    for weights in went_on:
        assert all(torch.equal(weights[name], tensor) for name, tensor in never_broke[0].items())


@pytest.mark.slow  # each starts torchrun, and its Pythons, two or three times
@pytest.mark.parametrize("name", ["kill", "sleep", "elsewhere", "nudge", "two nodes"])
def test_torchrun_starts_everybody_again_and_the_weights_are_the_same(name, tmp_path):
    found = run_fault(RUNS[name], tmp_path)
    assert found.ended_well and found.same_weights and RUNS[name].names in found.sentence
    assert found.seconds < RUNS[name].within
