"""Training on two machines, which are namespaces on one: what `tests/support/two_machines.py` promises, and runs over both."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from fault_table import SCRIPT
from network_table import CASES, run_case
from safetensors.torch import load_file
from trainer_runs import settings_file
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
from shared.parallel.processes.torchrun import from_torchrun

if os.environ.get("PAUSE") == "1":
    import torch.distributed as dist
    connect = dist.init_process_group
    def init_process_group(*words, **named):
        print("connects gloo")
        time.sleep(5)
        connect(*words, **named)
    dist.init_process_group = init_process_group
world, _ = from_torchrun(10.0, "cpu", init_timeout=float(os.environ.get("INIT", 60)))
print("connected over", os.environ["GLOO_SOCKET_IFNAME"])
while True:
    world.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""


LATE = "rank {} of 2 could not connect to the others within 15 s: read the output on their machines"


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
        assert re.search("rank 1 has sent no heartbeat for 1[0-2] s: it died, hangs or cannot be reached", jobs[0].output)
        assert re.search("rank 1 has had no answer from the machine of rank 0 for 1[0-2] s", jobs[1].output)
        assert all(job.ended - cut < 60 for job in jobs)  # the kernel gives up a connection after 15 minutes


@pytest.mark.slow
def test_a_name_that_leads_nowhere_is_refused_on_both_machines(tmp_path):
    with Machines(tmp_path / "machines", hosts="debian") as (a, b):
        jobs = ranks([a, b], "a", INIT="15")
        assert jobs[1].wait(TIMEOUT) and "MASTER_ADDR is 'a', which this machine cannot reach" in jobs[1].output
        assert jobs[0].wait(TIMEOUT) and LATE.format(0) in jobs[0].output


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "while"])
def test_ranks_that_cannot_connect_say_so_within_their_time(when, tmp_path):
    """The link fails before they meet, or between the store of the rendezvous and gloo, which would try for half an hour."""
    with Machines(tmp_path / "machines") as (a, b):
        if when == "before":
            b.cut()
        jobs = ranks([a, b], a.address, INIT="15", PAUSE=str(int(when == "while")))
        if when == "while":
            for job in jobs:
                job.wait_for("connects gloo", TIMEOUT)
            b.cut()
            codes = [job.wait(TIMEOUT) for job in jobs]
            assert codes == [EXIT_CODE] * 2
        else:
            assert all(job.wait(TIMEOUT) for job in jobs)
        assert all(LATE.format(rank) in job.output for rank, job in enumerate(jobs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rendezvous, hosts, master",
    [("static", "debian", None), ("static", "debian with DNS", "a"), ("c10d", "nowhere", None), ("c10d", "right", "a")],
)
def test_torchrun_trains_on_two_machines_whatever_they_call_themselves(rendezvous, hosts, master, tmp_path):
    with Machines(tmp_path / "machines", hosts=hosts) as (a, b):
        jobs = torchrun([a, b], [*SCRIPT, a.folder / "run"], rendezvous, master=master, addresses=master is None)
        codes = [job.wait(TIMEOUT) for job in jobs]
        assert codes == [0, 0], "\n".join(job.output for job in jobs)
        assert (a.kept / "run" / "weights.safetensors").exists()


@pytest.mark.slow
def test_torchrun_trains_over_ipv6_alone(tmp_path):
    with Machines(tmp_path / "machines") as (a, b):
        for machine in (a, b):
            machine.space.ip("address", "del", f"{machine.address}/24", "dev", "eth0")
        jobs = torchrun([a, b], [*SCRIPT, a.folder / "run"], master=a.address6)
        assert [job.wait(TIMEOUT) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_the_commands_of_the_page_on_machines_train_the_model_of_one_process(shared, tmp_path):
    text = (CHECKOUT / "chapters/12_grpo/MACHINES.md").read_text()
    block = re.search(r"## Several machines.*?```sh\n(.*?)```", text, re.DOTALL)[1]
    lines = [line for line in block.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    laptop, output = "chapters/12_grpo/laptop.yaml", "engine.output=runs/two"
    assert len(lines) == 2 and all(laptop in line and output in line and ".venv/bin/" in line for line in lines)
    file = settings_file(tmp_path, Path("runs/text"), model={"hidden_dropout": 0.0}, report={"completions": 0}, steps=4)
    with Machines(tmp_path / "machines", shared=shared, hosts="debian") as (a, b):
        there = f"engine.output={a.folder / 'two'} data.prepared={a.folder / 'text'}" if shared else output
        words = [(".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run"), ("192.168.1.10", a.address), (laptop, str(file))]
        jobs = []
        for machine, line in zip((a, b), lines, strict=True):
            for written, here in [*words, (output, there)]:
                line = line.replace(written, here)
            jobs.append(machine.start(["sh", "-c", line]))
        assert [job.wait(TIMEOUT) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
        alone = a.run(sys.executable, "chapters/12_grpo/train.py", file, "engine.output=runs/one", timeout=TIMEOUT)
        assert alone[0] == 0, alone[1]
        two, one = ((a.folder if shared else CHECKOUT / "runs") / "two", CHECKOUT / "runs" / "one")
        mine, theirs = (load_file(a.path_of(path / "model" / "model.safetensors")) for path in (two, one))
        assert all(torch.allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)
        assert b.path_of(two / "checkpoints" / "step-00000004").exists(), "every machine has a checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill", "cut 50", "cut fsdp", "own folders"])
def test_a_run_on_two_machines_goes_on_to_the_same_weights_after(name, tmp_path):
    """`network_table.py` has more cases. A rank may speak later on a busy machine, but not after the kernel gave up the connection."""
    found = run_case(CASES[name], tmp_path)
    assert found.difference == 0.0 and re.search(r"from step 1\d", found.resumed), found.outputs
    assert "a" in found.said and (name in ("kill", "own folders") or "b" in found.said), found.outputs
    assert all(seconds < 120 for seconds, _ in found.said.values())
