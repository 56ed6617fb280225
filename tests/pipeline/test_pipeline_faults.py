"""A stage that dies is named by all others, the command fails, and the run continues on any number of stages to the same weights."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from stage_faults import TABLE, Fault, follow
from trainer_runs import settings_file

from shared.trainer.launch import start

FAST = [Fault("pp2", "1f1b", 0, "backward", "pp2"), Fault("pp2", "1f1b", 1, "save", "dp2")]


@pytest.mark.parametrize("fault", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in TABLE)], ids=str)
def test_a_dead_stage_is_named_and_the_run_continues_on_other_stages(fault, tmp_path):
    found = follow(fault, tmp_path)
    found.require_killed_rank_named(fault.layout, fault.rank)
    found.require_resumed(fault.layout, fault.resumed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_trainers_command_ends_with_an_error_when_a_stage_is_killed(rank, tmp_path):
    model = {"hidden_dropout": 0.0, "num_hidden_layers": 4}
    file = settings_file(tmp_path, tmp_path / "prepared", model=model, data={"batch_size": 8}, report={"completions": 0})
    command, _ = start.command_of("pp2", [str(file), "steps=100000", f"engine.output={tmp_path / 'run'}"])
    with open(tmp_path / "printed", "w") as printed:
        begun = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=printed, stderr=printed)
        try:
            while not (tmp_path / "run" / "checkpoints").exists() or not any((tmp_path / "run" / "checkpoints").glob("step-????????")):
                assert begun.poll() is None, (tmp_path / "printed").read_text()
                time.sleep(0.2)
            os.kill(process_of(begun.pid, rank), signal.SIGKILL)
            assert begun.wait(timeout=300) != 0
        finally:
            begun.kill()
    told = (tmp_path / "printed").read_text()
    assert re.search(rf"rank {rank} has sent no heartbeat|rank\s*: {rank} .*\n\s*exitcode\s*: -9", told), told


def process_of(parent: int, rank: int) -> int:
    """The rank's process under torchrun."""
    for process in psutil.Process(parent).children(recursive=True):
        if process.environ().get("RANK") == str(rank) and sys.executable in process.cmdline()[0]:
            return process.pid
    raise AssertionError(f"rank {rank} is not there")
