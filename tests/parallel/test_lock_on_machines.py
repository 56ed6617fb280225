"""The lock on a run's folder that machines share: a second run is refused, and a machine that is gone or restarts ranks is in nobody's way.

Namespaces share a kernel, and so its file locks. Network file systems that carry none are stood in for by a `flock` that fails as there.
"""

import re
import sys

import pytest
from network_table import CASES, run_case
from trainer_runs import TRAIN, settings_file
from two_machines import Machines, torchrun

TIMEOUT = 300
# Holds the folder, once it has it, until it is killed. Its third word is how many seconds without a heartbeat make a holder count as gone.
HOLDER = """
import errno, fcntl, sys, time
from pathlib import Path
from shared import folder_lock

def no_locks(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")

if sys.argv[2] == "none":
    fcntl.flock = no_locks
folder_lock.FIRST_BEAT, folder_lock.BEAT, folder_lock.STALE = 0.1, 0.1, float(sys.argv[3])
try:
    with folder_lock.FolderLock(Path(sys.argv[1]), say=lambda sentence: print("waits:", sentence)):
        print("has it")
        time.sleep(1000)
except folder_lock.FolderInUse as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("flock", ["carried", "none"])
def test_a_folder_is_one_machines_until_that_machine_is_gone(flock, tmp_path):
    with Machines(tmp_path / "machines") as (a, b):
        words = [sys.executable, "-c", HOLDER, a.folder / "run", flock]
        first = a.start([*words, "60"], TORCHELASTIC_RUN_ID="night7")
        first.wait_for("has it", TIMEOUT)
        code, said = b.run(*words, "60")
        refusal = r"(waits: .*\n)?refused: .*/run is in use by process \d+ on a \(job night7\) since .*"
        assert code == 0 and re.fullmatch(refusal, said), said
        assert said.endswith(f"give another output folder, or delete {a.folder}/run/run.lock if that machine is gone.")
        a.end()
        second = b.start([*words, "2"])
        second.wait_for("has it", TIMEOUT)
        waiting = r"waits: .* on a \(job night7\) .* waiting at most \d s for a sign of it\.\nhas it"
        assert re.fullmatch(waiting, second.output), second.output


@pytest.mark.slow
def test_the_same_command_without_nnodes_on_a_second_machine_is_refused(tmp_path):
    """Each is a run of its own, with one rank, where two machines were meant to train together."""
    file = settings_file(tmp_path, tmp_path / "prepared", steps=100_000, report={"completions": 0})
    with Machines(tmp_path / "machines") as (a, b):
        words = [TRAIN, file, f"engine.output={a.folder / 'run'}"]
        [first] = torchrun([a], words, "c10d")
        first.wait_for("step +2 of", TIMEOUT)
        [second] = torchrun([b], words, "c10d")
        assert second.wait(TIMEOUT) == 1
        said = [line for _, line in second.lines if "is in use" in line and "sign of it" not in line]
        sentence, cause = said  # where it was refused, and as the cause in torchrun's own summary
        assert "traceback :" in cause and sentence.split("/run is in use")[1] == cause.split("/run is in use")[1]
        assert re.search(r"/run is in use by process \d+ on a \(job machines\) since .*: wait for it, stop it, or give another", sentence)
        assert first.ended is None
        a.rank(0).terminate()
        assert first.wait(TIMEOUT) and re.search("The same command resumes from step [1-9]", first.output)
        assert not (a.kept / "run" / "run.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill 0", "kill 0 c10d", "power a"])
def test_the_lock_of_a_rank_that_was_killed_holds_nobody_up(name, tmp_path):
    """torchrun restarts all ranks, or the command is given again after the machine was; the weights equal an uninterrupted run's."""
    found = run_case(CASES[name], tmp_path)
    assert found.difference == 0.0 and re.search(r"from step 1\d", found.resumed), found.outputs
    assert ("by itself" in found.resumed) == (name != "power a"), found.outputs
    assert "is in use by" not in re.sub(".*waiting at most.*", "", found.outputs), found.outputs
