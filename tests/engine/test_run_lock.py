"""A run has its folder for itself: a second engine in it is refused before any work, and a killed run's folder is free at once."""

import os
import signal
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console
from runs import Loader, make_engine, resumable_engine

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.engine.callbacks import Callback
from shared.folder_lock import FolderInUse, FolderLock

SCRIPT = CHECKOUT / "tests" / "support" / "runs.py"


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_run_is_refused_before_it_touches_anything_and_goes_on_after_a_kill(tmp_path):
    """The first one is a script with an engine, as a learner writes it."""
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | {"PYTHONPATH": str(CHECKOUT)}}
    first = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path), "1000000"], **pipes)
    second = resumable_engine(tmp_path, console=Console(file=StringIO(), width=500))
    while not second.checkpoints.steps():
        assert first.stdout.readline()
    first.send_signal(signal.SIGSTOP)  # so that what it has written stays as it is
    before = content(tmp_path)
    with pytest.raises(CourseError, match=f"is in use by process {first.pid} on {os.uname().nodename} since .*: wait for it, stop it"):
        second.fit(Loader(), steps=9)
    assert content(tmp_path) == before and second.step == 0
    first.kill()
    first.communicate()
    saved = second.checkpoints.steps()[-1]
    second.fit(Loader(), steps=saved + 2)
    assert f"Going on from step {saved}" in second.console.file.getvalue() and second.step == saved + 2
    assert not (tmp_path / "run.lock").exists()


def test_a_run_whose_folder_was_taken_ends_without_another_checkpoint(tmp_path):
    """As after minutes in which its machine was away."""

    class Taken(Callback):
        def on_step(self, engine):
            if engine.step == 3:
                engine.lock.lost = "another run is in the folder"

    engine = make_engine(tmp_path, [Taken()], every=2)
    with pytest.raises(FolderInUse, match="another run is in the folder"):
        engine.fit(Loader(), steps=9)
    assert engine.checkpoints.steps() == [2]


def test_an_engine_that_ends_in_an_error_leaves_the_folder(tmp_path):
    with pytest.raises(CourseError, match="The data ended"):
        make_engine(tmp_path).fit(Loader(limit=1), steps=2)
    with FolderLock(tmp_path):
        make_engine(tmp_path).fit(Loader(), steps=2)  # in the thread that holds it, as the trainer does
