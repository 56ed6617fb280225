"""Gloo's threads end before the interpreter does: one that releases a tensor after that aborts its process, with exit code -6."""

import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from ports import reserved_port

from shared.parallel.processes import gloo_routes
from shared.parallel.processes.launch import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that ranks need not import pytest


def gloo_threads() -> list[str]:
    """The names of this process's threads that carry out gloo's operations."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def ended_gloo(world):
    parts = world.split("two", [(0, 1)])
    parts.all_reduce(torch.ones(1))
    before = gloo_threads()
    gloo_routes.end_threads()
    return bool(before), gloo_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_gloos_threads_end_before_the_interpreter_in_which_they_would_abort():
    assert run_processes(ended_gloo, 2) == [(True, [])] * 2


LAST = """
import atexit, sys
from test_gloo_threads import gloo_threads
atexit.register(lambda: print("in the end:", gloo_threads()))
import torch
from shared.parallel.processes.torchrun import from_torchrun
world, _ = from_torchrun(30.0, "cpu")
world.all_reduce(torch.ones(1))
print("has", len(gloo_threads()) > 0)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_a_rank_of_torchrun_ends_gloos_threads_when_it_ends():
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with reserved_port() as port:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        environment = os.environ | place | path
        ranks = [subprocess.Popen([sys.executable, "-c", LAST], env=environment | {"RANK": str(rank)}, **pipes) for rank in (0, 1)]
        said = [rank.communicate(timeout=600) for rank in ranks]
    assert [(rank.returncode, out) for rank, (out, _) in zip(ranks, said, strict=True)] == [(7, "has True\nin the end: []\n")] * 2, said
