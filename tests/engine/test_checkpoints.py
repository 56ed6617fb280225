"""Checkpoints on a bad day: cut short, edited, no space, no permission, a process that dies in the middle of a save."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from runs import Loader, held_out, resumable_engine, weights

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.engine.checkpoint.folder import CheckpointError, Checkpoints
from shared.engine.checkpoint import files as checkpointing
from shared.engine.config import CheckpointConfig

SCRIPT = CHECKOUT / "tests" / "support" / "runs.py"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def edit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 7)


DAMAGE = {
    "one bit of the weights": ("weights.safetensors", edit, "is not what was saved"),
    "the optimizer cut short": ("optimizer.safetensors", cut, r"optimizer.safetensors has \d+ bytes of \d+"),
    "the state edited": ("state.json", edit, "is not what was saved"),
    "a file removed": ("random.safetensors", lambda path: path.unlink(), "random.safetensors is missing"),
    "no manifest": ("manifest.json", lambda path: path.unlink(), "its manifest.json is missing"),
    "a manifest of something else": (
        "manifest.json",
        lambda path: path.write_text("[1]"),
        "its manifest.json is missing or cannot be read",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, what, capsys):
    file, damage, sentence = DAMAGE[what]
    whole = resumable_engine(tmp_path / "whole").fit(Loader(), steps=13)
    engine = resumable_engine(tmp_path / "run").fit(Loader(), steps=10)
    damage(engine.checkpoints.path(10) / file)
    with pytest.raises(CheckpointError, match=sentence):
        engine.checkpoints.load(10)
    again = resumable_engine(tmp_path / "run").fit(Loader(), steps=13)
    said = " ".join(capsys.readouterr().out.split())
    assert "step-00000010 is damaged" in said and "Going on from step 5" in said
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(whole).items())


def test_a_save_below_a_damaged_future_is_kept(tmp_path):
    keep = CheckpointConfig(every=5, keep_last=1)
    engine = resumable_engine(tmp_path, checkpoint=CheckpointConfig(every=5)).fit(Loader(), steps=10)
    edit(engine.checkpoints.path(10) / "weights.safetensors")
    assert resumable_engine(tmp_path, checkpoint=keep).fit(Loader(), steps=8).checkpoints.steps() == [8]


def test_the_best_of_a_future_that_was_given_up_goes_with_it(tmp_path):
    snapshot = resumable_engine(tmp_path / "run").fit(Loader(), steps=1).checkpoints.load(1)
    checkpoints = Checkpoints(tmp_path / "kept", keep_last=1)
    for step, loss, left in ((2, 3.0, [2]), (4, 1.0, [4]), (3, 2.0, [3]), (5, 2.5, [3, 5])):
        checkpoints.save(replace(snapshot, step=step), {"validation_loss": loss})
        assert checkpoints.steps() == left


def test_what_killed_processes_left_half_removed_or_put_aside_is_cleared_away(tmp_path):
    engine = resumable_engine(tmp_path)
    for name in ("step-00000001.removed", "step-00000002.old"):
        (engine.checkpoints.folder / name / "deep").mkdir(parents=True)
    engine.fit(Loader(), steps=1)
    assert [path.name for path in engine.checkpoints.folder.iterdir()] == ["step-00000001"]


def test_where_none_is_intact_the_run_is_refused(tmp_path):
    engine = resumable_engine(tmp_path).fit(Loader(), steps=10)
    for step in engine.checkpoints.steps():
        edit(engine.checkpoints.path(step) / "weights.safetensors")
    with pytest.raises(CheckpointError, match="No checkpoint in .* is intact: remove that folder to start over"):
        resumable_engine(tmp_path).fit(Loader(), steps=12)


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    resumable_engine(tmp_path).fit(Loader(), steps=5)
    monkeypatch.setattr("shared.engine.checkpoint.folder.FORMAT", 99)
    resumable_engine(tmp_path).fit(Loader(), steps=7)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="step-00000007 has the format 99, and this version reads 2"):
        resumable_engine(tmp_path).fit(Loader(), steps=9)


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    engine = resumable_engine(tmp_path).fit(Loader(), steps=3)
    for path in engine.checkpoints.path(3).iterdir():
        assert path.suffix in (".safetensors", ".json")
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            header = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + header])


def test_the_output_folder_is_tried_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match="cannot be written"):
        resumable_engine(tmp_path / "file" / "run").fit(Loader(), steps=1)


class FullDisk:
    """A disk that is full after some saves."""

    def __init__(self, saves: int):
        self.before, self.left = checkpointing.save_tensors, saves

    def write(self, tensors, path, metadata=None):
        self.left -= path.stem == "weights"
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.before(tensors, path, metadata)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_costs_a_checkpoint_and_no_training(tmp_path, asynchronous, capsys, monkeypatch):
    engine = resumable_engine(tmp_path, checkpoint=CheckpointConfig(every=5, asynchronous=asynchronous))
    monkeypatch.setattr(checkpointing, "save_tensors", FullDisk(saves=1).write)
    with pytest.raises(CheckpointError, match="step 16 could not be written.*No space left on device.*Step 5 is still saved"):
        engine.fit(Loader(), steps=16)
    assert engine.step == 16 and engine.checkpoints.steps() == [5]
    assert "step 10 could not be written" in " ".join(capsys.readouterr().out.split())
    assert not list(engine.checkpoints.folder.glob("*.partial"))


def test_a_real_limit_on_file_sizes_is_a_sentence(tmp_path):
    """No disk is full here: the operating system refuses a file above 4 kB in the child, as it would on a full disk."""
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "
    script = f"import runpy; sys.argv = ['x', {str(tmp_path)!r}, '4', 'synchronous']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", limited + f"sys.path.insert(0, {str(SCRIPT.parent)!r}); " + script], capture_output=True, text=True
    )
    assert done.returncode == 1 and "could not be written" in done.stderr and "free space there" in done.stderr
    assert not list((tmp_path / "checkpoints").iterdir())


def after_some_steps(child: subprocess.Popen, generator: random.Random) -> None:
    for _ in range(generator.randrange(30)):
        child.stdout.readline()


def after_some_time(child: subprocess.Popen, generator: random.Random) -> None:
    """In the middle of a step or of a save."""
    time.sleep(generator.uniform(0, 0.35))


def kill_at_random(folder, steps: int, generator: random.Random, wait) -> bool:
    """Start the run, kill it with SIGKILL at a random moment of training. Returns whether it was killed before its end."""
    mode = generator.choice(["asynchronous", "synchronous"])
    child = subprocess.Popen([sys.executable, SCRIPT, folder, str(steps), mode], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()  # training has begun
    wait(child, generator)
    child.send_signal(signal.SIGKILL)
    child.stdout.close()
    return child.wait() == -signal.SIGKILL


def killed_and_resumed(tmp_path, kills: int, steps: int, seed: int, wait) -> tuple[int, int]:
    """Kill a run again and again, let it end, and compare with one that was never killed. Returns kills and leftovers of saves.

    Until then it has more steps to do than any machine does between two kills; it ends `steps` after the last one that was saved.
    """
    generator, landed, leftovers = random.Random(seed), 0, 0
    for _ in range(kills):
        landed += kill_at_random(tmp_path / "killed", 10**7, generator, wait)
        leftovers += any((tmp_path / "killed" / "checkpoints").glob("*.partial"))
    steps += max(Checkpoints(tmp_path / "killed" / "checkpoints").steps(), default=0)
    run = subprocess.run([sys.executable, SCRIPT, tmp_path / "killed", str(steps)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    whole = resumable_engine(tmp_path / "whole", checkpoint=CheckpointConfig(every=0)).fit(Loader(), held_out(), steps=steps)
    killed = Checkpoints(tmp_path / "killed" / "checkpoints").load(steps).weights
    assert all(torch.equal(tensor, killed[name]) for name, tensor in weights(whole).items())
    return landed, leftovers


def test_a_run_killed_three_times_ends_with_the_same_weights(tmp_path):
    landed, _ = killed_and_resumed(tmp_path, kills=3, steps=40, seed=0, wait=after_some_steps)
    assert landed == 3


@pytest.mark.slow
def test_a_run_killed_fifty_times_ends_with_the_same_weights(tmp_path):
    landed, leftovers = killed_and_resumed(tmp_path, kills=50, steps=40, seed=1, wait=after_some_time)
    print(f"{landed} kills, {leftovers} of them during a save")
    assert landed == 50 and leftovers >= 1
