"""`course doctor --machines`: what two machines, which are namespaces on one, find out about each other before a run."""

import re
import sys
from types import SimpleNamespace

import pytest
from two_machines import Machines
from workspace import Learner

from shared.parallel.comm.threads import run_threads
from shared.parallel.processes import machines as checking

COURSE = [sys.executable, "-c", "from shared.course.cli import main; main()"]
TIMEOUT = 120


def doctor(machines, *more: object):
    """The command on each machine, as a user types it. Returns exit codes and outputs."""
    words = [*COURSE, "doctor", "--machines", len(machines), "--address", machines[0].address]
    jobs = [machine.start([*words, "--machine", number, *more]) for number, machine in enumerate(machines)]
    return [job.wait(TIMEOUT) for job in jobs], [re.sub(r"\s+", " ", job.output) for job in jobs]


def test_machines_say_where_they_are_how_fast_their_link_is_and_that_they_share_a_folder(tmp_path):
    with Machines(tmp_path, shared=True) as machines:
        codes, told = doctor(machines, "--folder", machines[0].folder)
        assert codes == [0, 0] and told[0] == told[1]
        for number, machine in enumerate(machines):
            assert f"machine {number} {machine.name}, {machine.address} by eth0" in told[0]
        assert "the same code, exercises and packages on all machines" in told[0]
        assert "is one folder for all machines" in told[0] and ("All is well" in told[0] or "0 problems, 1 warning" in told[0])
        assert re.search(r"link 0-1 [\d.]+ ms, [\d,]+ MB/s", told[0])


def test_a_slow_link_other_code_and_a_folder_of_its_own_are_named(tmp_path):
    with Machines(tmp_path, shared=False) as (a, b):
        b.run("sh", "-c", "echo '# changed' >> shared/loop.py")
        b.slow("80mbit")
        codes, told = doctor((a, b), "--folder", a.folder)
        assert codes == [1, 1] and told[0] == told[1]
        assert "files.shared/loop.py is" in told[0] and "Bring the code and the packages of all machines to the same state" in told[0]
        megabytes = float(re.search(r"link 0-1 [\d.]+ ms, ([\d,]+) MB/s", told[0])[1].replace(",", ""))
        assert 3 <= megabytes <= 11  # 80 Mbit/s are 10 MB/s
        assert "choose a larger batch" in told[0] and "on machine 1 is not that of machine 0" in told[0]


def test_a_machine_that_nobody_meets_says_so_in_one_sentence(tmp_path):
    with Machines(tmp_path, names=("a",)) as (alone,):
        words = [*COURSE, "doctor", "--machines", 2, "--address", alone.address, "--wait", 2]
        code, told = alone.run(*words, timeout=TIMEOUT)
        assert code == 64 and told.count("\n") <= 2 and "could not connect to the others within 2 s" in told


@pytest.mark.parametrize(("machines", "seconds"), [(2, 4.96), (4, 7.44)])
def test_the_time_of_an_all_reduce_is_a_rings_over_the_slowest_link(machines, seconds, monkeypatch):
    """496 MB travel 2 (n - 1) / n times; at 100 MB/s."""
    monkeypatch.setattr(checking, "measure_link", lambda world, other: checking.LinkSpeed(0.001, 1e8 * other))
    *speeds, gradients = checking.links(SimpleNamespace(size=machines))
    assert [speed.about for speed in speeds] == [f"link 0-{other}" for other in range(1, machines)]
    assert speeds[0].sentence == "1.00 ms, 100 MB/s (0.8 Gbit/s)"
    assert f"at least {seconds:.1f} s a step" in gradients.sentence


def test_a_latency_is_half_a_round_trip_and_bytes_count_in_both_directions(monkeypatch):
    """A link of 1 ms and 10 MB/s, and a clock of its own: ranks are threads."""
    monkeypatch.setattr(checking, "round_trip", lambda world, other, size: 2 * (0.001 + (size / 1e7 if size > 4 else 0)))
    found = run_threads(lambda world: checking.measure_link(world, 1), 3)
    assert [speed.latency for speed in found] == [0.001] * 3
    assert found[0].bandwidth == found[1].bandwidth == found[2].bandwidth == pytest.approx(1e7, rel=0.05)


def test_a_machine_outside_of_the_count_is_refused(tmp_path):
    refused = Learner(tmp_path).course("doctor", "--machines", "2", "--machine", "2")
    assert refused.exit_code == 64 and "2 machines have the numbers 0 to 1" in refused.output
