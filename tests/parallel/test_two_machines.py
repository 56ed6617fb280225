"""Training on two machines, which are namespaces on one: what `tests/support/two_machines.py` promises, and runs over both."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from fault_table import SCRIPT
from two_machines import Machines, reason_against, torchrun

from shared.course.paths import CHECKOUT
from shared.parallel.health.heartbeat import EXIT_CODE

CONNECT = "import socket; socket.create_connection(({!r}, 9000), timeout=1).close(); print('answered')"
LISTEN = "import socket\nserver = socket.create_server(('', 9000))\nprint('listens')\nwhile True: server.accept()[0].close()"
TIMEOUT = 300


def test_machines_have_a_name_a_copy_and_a_folder_of_their_own_and_reach_each_other(tmp_path):
    with Machines(tmp_path / "machines", shared=False) as (a, b):
        write = f"echo changed >> README.md; hostname > {a.folder}/name; hostname"
        assert [machine.run("sh", "-c", write) for machine in (a, b)] == [(0, "a"), (0, "b")]
        assert [(machine.kept / "name").read_text() for machine in (a, b)] == ["a\n", "b\n"]
        assert a.run("tail", "-1", "README.md") == (0, "changed") and len(a.processes()) == 0
        server = b.start([sys.executable, "-c", LISTEN])
        server.wait_for("listens", 60)
        connects = lambda: a.run(sys.executable, "-c", CONNECT.format(b.address))[1].endswith("answered")  # noqa: E731
        assert connects()
        b.cut()
        assert not connects()
        b.mend()
        until = time.monotonic() + 60  # the neighbour counts as gone for some seconds
        while not connects():
            assert time.monotonic() < until
        b.end()
        assert server.wait(10) == -9 and a.run("hostname") == (0, "a")


HELD = """
import sys, time
from pathlib import Path
from two_machines import Machines

with Machines(Path(sys.argv[1])) as machines:
    for machine in machines:
        machine.start(["sleep", "1000"])
    while sum(len(machine.processes()) for machine in machines) < 2:
        time.sleep(0.02)
    print("all run", flush=True)
    time.sleep(1000)
"""


def test_machines_end_with_the_process_that_made_them_even_if_that_is_killed(tmp_path):
    if reason := reason_against():
        pytest.skip(reason)
    path = os.pathsep.join([str(CHECKOUT / "tests" / "support"), str(CHECKOUT)])
    command = [sys.executable, "-c", HELD, str(tmp_path / "machines")]
    maker = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    assert maker.stdout.readline() == "all run\n"
    left = psutil.Process(maker.pid).children(recursive=True)
    assert sum(process.cmdline() == ["sleep", "1000"] for process in left) == 2
    maker.kill()
    maker.communicate()
    assert not psutil.wait_procs(left, timeout=60)[1]


RANK = """
import os, time, torch
from shared.parallel.comm.processes import from_torchrun

world, _ = from_torchrun(3.0, "cpu", init_timeout=60.0)
print("connected over", os.environ["GLOO_SOCKET_IFNAME"])
while True:
    world.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""


def ranks(machines, master, **environment):
    """One rank on each machine, without torchrun, which takes as long again to start."""
    common = {"MASTER_ADDR": master, "MASTER_PORT": "29400", "WORLD_SIZE": str(len(machines))} | environment
    return [machine.start([sys.executable, "-c", RANK], RANK=str(rank), **common) for rank, machine in enumerate(machines)]


def test_ranks_connect_where_names_mislead_and_all_of_them_speak_after_a_cut(tmp_path):
    """As on Debian, each machine takes its own name for 127.0.1.1; the other knows the first one's address."""
    with Machines(tmp_path / "machines", hosts="debian with DNS") as (a, b):
        jobs = ranks([a, b], "a")
        for job in jobs:
            job.wait_for("connected over eth0", TIMEOUT)
        cut = time.monotonic()
        b.cut()
        assert [job.wait(TIMEOUT) for job in jobs] == [EXIT_CODE] * 2
        assert "rank 1 has sent no heartbeat for 3 s: it died, hangs or cannot be reached" in jobs[0].output
        assert "rank 1 has had no answer from the machine of rank 0 for 3 s" in jobs[1].output
        assert all(job.ended - cut < 60 for job in jobs)  # the kernel gives up a connection after 15 minutes


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_trains_on_two_machines(rendezvous, tmp_path):
    with Machines(tmp_path / "machines", hosts="right") as (a, b):
        jobs = torchrun([a, b], [*SCRIPT, a.folder / "run"], rendezvous)
        codes = [job.wait(TIMEOUT) for job in jobs]
        assert codes == [0, 0], "\n".join(job.output for job in jobs)
        assert (a.kept / "run" / "weights.safetensors").exists()
