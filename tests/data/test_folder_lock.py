"""The lock on a folder: one process has it, a dead one never does, and another machine's counts while it gives signs of life."""

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from shared import folder_lock
from shared.course.errors import CourseError
from shared.data.cleaning.cleaner import CleaningConfig
from shared.data.prepare import PrepareConfig, prepare
from shared.data.source import Source
from shared.folder_lock import FolderInUse, FolderLock, myself

SECONDS = 60  # of a machine that does much else
# Waits for a line on standard input, takes the lock, says so, and holds it until its input ends.
HOLDER = """
import os, sys, time
from pathlib import Path
from shared.folder_lock import FolderInUse, FolderLock
print("ready", flush=True)
sys.stdin.readline()
try:
    with FolderLock(Path(sys.argv[1])):
        if "fork" in sys.argv:
            if not os.fork():
                print("forked", os.getpid(), flush=True)
                time.sleep(1000)
        else:
            print("has it", flush=True)
        sys.stdin.read()
except FolderInUse as error:
    print(error, flush=True)
"""


class Holder:
    """A process that takes the lock of `folder` and holds it."""

    def __init__(self, folder, *words, **environment):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", HOLDER, str(folder), *words]
        self.process = subprocess.Popen(command, env=os.environ | environment, **pipes)
        assert self.line() == "ready"

    def line(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def begin(self) -> "Holder":
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def end(self) -> None:
        self.process.communicate(timeout=SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats every 50 ms; a holder counts as gone after 3 s without one."""
    for name, seconds in (("FIRST_BEAT", 0.05), ("BEAT", 0.05), ("STALE", 3.0)):
        monkeypatch.setattr(folder_lock, name, seconds)


@pytest.fixture
def sleeps(monkeypatch):
    """The seconds that a process that waits for a holder has slept. The file system's clock moves by them alone, and nothing sleeps."""
    slept = []
    monkeypatch.setattr(FolderLock, "clock", lambda lock: lock.path.stat().st_mtime + sum(slept))
    monkeypatch.setattr(folder_lock, "time", SimpleNamespace(sleep=slept.append))
    return slept


def written(folder, **changes) -> str:
    """A lock file that somebody left."""
    record = json.dumps(myself() | {"boot": "another", "host": "far", "token": "theirs"} | changes)
    (folder / "run.lock").write_text(record)
    return record


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_process_is_refused_with_the_first_ones_process_host_time_and_job(tmp_path):
    holder = Holder(tmp_path, TORCHELASTIC_RUN_ID="night7").begin()
    assert holder.line() == "has it"
    record = json.loads((tmp_path / "run.lock").read_text())
    with pytest.raises(FolderInUse) as refused, FolderLock(tmp_path):
        pass
    assert str(refused.value) == (
        f"{tmp_path} is in use by process {holder.process.pid} on {os.uname().nodename} (job night7) since {record['since']}: "
        "wait for it, stop it, or give another output folder."
    )
    holder.end()
    assert not list(tmp_path.iterdir()), "a run that ended leaves no lock"
    with FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("forked", [False, True])
def test_a_killed_holder_leaves_the_folder_at_once(tmp_path, forked):
    """Also while a child that it forked lives on, which has all of its open files."""
    holder = Holder(tmp_path, *["fork"] * forked).begin()
    child = holder.line()
    holder.process.kill()
    holder.process.wait()
    try:
        waited_for = []
        with FolderLock(tmp_path, say=waited_for.append):
            assert not waited_for
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    finally:
        if forked:
            os.kill(int(child.split()[1]), signal.SIGKILL)
        holder.process.communicate(timeout=SECONDS)


def test_of_processes_that_start_at_the_same_moment_exactly_one_wins(tmp_path):
    for round in range(3):
        holders = [Holder(tmp_path / str(round)) for _ in range(4)]
        for holder in holders:
            holder.begin()
        said = [holder.line() for holder in holders]
        assert said.count("has it") == 1 and sum("is in use by" in line for line in said) == 3, said
        for holder in holders:
            holder.end()


def test_a_process_id_that_another_process_has_by_now_holds_nothing(tmp_path):
    written(tmp_path, boot=folder_lock.boot(), pid=os.getppid(), host=os.uname().nodename)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b'{"pid": 1, "ho', b"\0" * 200, b"[1]", b'{"pid": 1}', b"\xff\xfe"])
def test_what_a_crash_left_half_written_holds_nothing(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    with FolderLock(tmp_path):
        pass


def test_another_machines_old_lock_is_taken_at_once(tmp_path):
    written(tmp_path)
    os.utime(tmp_path / "run.lock", (time.time() - 100, time.time() - 100))
    said = []
    with FolderLock(tmp_path, say=said.append):
        assert not said


@pytest.mark.parametrize("carried", [True, False])
def test_another_machines_young_lock_is_waited_for_and_taken_when_it_gives_no_sign(tmp_path, sleeps, monkeypatch, carried):
    """carried: whether the file system has locks. Without, that is how all locks are judged."""
    if not carried:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    written(tmp_path, boot="another" if carried else folder_lock.boot())
    said = []
    with FolderLock(tmp_path, say=said.append):
        assert sum(sleeps) == folder_lock.STALE and len(sleeps) == 60, "it looks for a sign of it every second"
    [sentence] = said
    assert f"process {os.getpid()} on far since" in sentence and "waiting at most 60 s for a sign of it" in sentence
    assert f"or delete {tmp_path / 'run.lock'} if that machine is gone" in sentence
    assert not list(tmp_path.iterdir())


def no_locks(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")


def test_another_machine_that_lives_is_refused(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(folder_lock, "STALE", 3 * SECONDS)
    written(tmp_path)
    lives, ended = threading.Thread(target=lambda: [os.utime(tmp_path / "run.lock") for _ in iter(lambda: ended.wait(0.05), True)]), None
    ended = threading.Event()
    lives.start()
    try:
        with pytest.raises(FolderInUse, match="is in use by process .* on far since"), FolderLock(tmp_path):
            pass
    finally:
        ended.set()
        lives.join()


def test_a_holder_whose_folder_was_taken_finds_out_and_leaves_the_new_lock_alone(tmp_path, quick):
    with FolderLock(tmp_path) as lock:
        lock.require_held()
        theirs = written(tmp_path, pid=77)
        until(lambda: lock.lost)
        with pytest.raises(FolderInUse, match="lost its folder. .* is in use by process 77 on far"):
            lock.require_held()
    assert (tmp_path / "run.lock").read_text() == theirs


def test_a_lock_that_somebody_deleted_is_made_again(tmp_path, quick):
    with FolderLock(tmp_path) as lock:
        (tmp_path / "run.lock").unlink()
        until((tmp_path / "run.lock").exists)
        holder = Holder(tmp_path).begin()
        assert "is in use by" in holder.line()
        holder.end()
        lock.require_held()


def test_a_lock_is_touched_while_it_is_held(tmp_path, quick):
    with FolderLock(tmp_path):
        os.utime(tmp_path / "run.lock", (0, 0))
        until(lambda: (tmp_path / "run.lock").stat().st_mtime > 0)


def test_the_thread_that_has_the_folder_may_take_it_again_and_another_may_not(tmp_path):
    refused = []

    def other():
        try:
            with FolderLock(tmp_path):
                pass
        except FolderInUse as error:
            refused.append(str(error))

    with FolderLock(tmp_path):
        with FolderLock(tmp_path):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert f"process {os.getpid()} on" in refused[0]


def test_who_may_wait_waits(tmp_path):
    holder = Holder(tmp_path).begin()
    assert holder.line() == "has it"
    said = []

    def say(sentence):
        said.append(sentence)
        holder.end()

    with FolderLock(tmp_path, wait=True, say=say):
        assert len(said) == 1 and said[0].endswith("Waiting for it.")


def test_a_disk_without_room_for_the_lock_is_a_sentence(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CourseError, match=r"run.lock cannot be written \(No space left on device\): free space"), FolderLock(tmp_path):
        pass
    monkeypatch.undo()
    with FolderLock(tmp_path):
        pass


def test_of_two_processes_that_prepare_the_same_text_one_waits_for_the_other(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"Number {i} is the square of no number but {i * i}.\n" for i in range(400)))
    config = PrepareConfig(sources=(Source(str(tmp_path / "text.txt")),), vocab_size=400)
    name = prepare(config, tmp_path / "first").folder.name
    holder = Holder(tmp_path / "second" / name).begin()
    assert holder.line() == "has it"

    class Output(io.StringIO):
        def write(self, text):
            if "is in use by process" in text:
                holder.end()
            return super().write(text)

    console = Console(file=Output(), width=1000)
    assert prepare(config, tmp_path / "second", console).folder.name == name
    assert console.file.getvalue().rstrip().endswith("Waiting for it.") and holder.process.returncode == 0
