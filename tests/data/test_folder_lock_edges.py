"""The lock on a folder where processes fork, take it twice, or meet in the moment in which it changes hands."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time

import pytest
from test_folder_lock import SECONDS, no_locks, quick, sleeps, until, written  # noqa: F401

from shared import folder_lock
from shared.folder_lock import FolderInUse, FolderLock

# Its child tries the lock, and then leaves the block in which it was forked.
FORKING = """
import os, sys
from pathlib import Path
from shared.folder_lock import FolderInUse, FolderLock
folder = Path(sys.argv[1])
with FolderLock(folder):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        try:
            with FolderLock(folder):
                print("the child has it too", flush=True)
        except FolderInUse:
            print("the child is refused", flush=True)
if child:
    sys.exit()
print("its parent's lock is", "there" if (folder / "run.lock").exists() else "gone", flush=True)
"""


def test_a_forked_child_has_no_lock_and_leaves_its_parents_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "the child is refused\nits parent's lock is there\n", done.stderr
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("carried", [True, False])
def test_a_holder_on_another_machine_that_ends_while_it_is_waited_for_leaves_the_folder(
    tmp_path, monkeypatch, sleeps, carried,  # noqa: F811
):  # fmt: skip
    """It removes its file as it ends, in the middle of our looks at it."""
    if not carried:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    written(tmp_path)
    with FolderLock(tmp_path, say=lambda sentence: (tmp_path / "run.lock").unlink()):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert sleeps == [folder_lock.FIRST_BEAT] and not list(tmp_path.iterdir())


def test_a_machine_that_takes_the_folder_in_the_same_tick_of_the_clock_is_seen(tmp_path):
    """Modification times of some file systems count whole seconds: two machines may write within one."""
    written(tmp_path)
    before = (tmp_path / "run.lock").stat().st_mtime_ns

    def other_takes_it(sentence):
        written(tmp_path, pid=78, token="a third one's")
        os.utime(tmp_path / "run.lock", ns=(before, before))

    with pytest.raises(FolderInUse, match="is in use by process 78 on far"), FolderLock(tmp_path, say=other_takes_it):
        pass


def test_the_file_of_a_lock_that_is_made_again_is_closed(tmp_path, quick):  # noqa: F811
    with FolderLock(tmp_path) as lock:
        old, was = lock.handle, os.fstat(lock.handle)
        (tmp_path / "kept").hardlink_to(tmp_path / "run.lock")  # so that no new file gets its number
        (tmp_path / "run.lock").unlink()
        until(lambda: lock.handle != old)
        try:
            assert not os.path.samestat(was, os.fstat(old)), "it is another file by now"
        except OSError as error:
            assert error.errno == errno.EBADF
    (tmp_path / "kept").unlink()


def test_who_has_taken_the_folder_twice_finds_out_by_either_lock(tmp_path):
    """The engine asks by its own, inside the trainer's."""
    with FolderLock(tmp_path) as outer, FolderLock(tmp_path) as inner:
        inner.require_held()
        outer.lost = "another run is in the folder"
        with pytest.raises(FolderInUse, match="another run"):
            inner.require_held()


def test_a_lock_that_its_holder_removes_while_another_process_asks_for_it_is_made_again(tmp_path, monkeypatch):
    granted, opened = FolderLock.granted, []

    def removed_first(lock, handle):
        opened.append(handle)
        if len(opened) == 1:
            lock.path.unlink()
        return granted(lock, handle)

    monkeypatch.setattr(FolderLock, "granted", removed_first)
    with FolderLock(tmp_path) as lock:
        assert len(opened) == 2 and folder_lock.same_file(tmp_path / "run.lock", lock.handle)


def test_a_deleted_lock_that_another_process_makes_first_is_lost(tmp_path, quick, monkeypatch):  # noqa: F811
    with FolderLock(tmp_path) as lock:
        asked = []

        def refused():
            asked.append(1)
            raise FolderInUse("another process was faster")

        monkeypatch.setattr(lock, "take", refused)
        (tmp_path / "run.lock").unlink()
        until(lambda: asked)
        theirs = written(tmp_path, pid=77)
        until(lambda: lock.lost)
        with pytest.raises(FolderInUse, match="lost its folder. .* is in use by process 77 on far"):
            lock.require_held()
    assert (tmp_path / "run.lock").read_text() == theirs


def test_a_longer_record_that_was_left_there_is_overwritten_whole(tmp_path):
    written(tmp_path, boot=folder_lock.boot(), host="h" * 500)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_age_is_by_the_file_systems_clock_and_not_by_this_machines(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(folder_lock.time, "time", lambda: now + 10**6)
    assert FolderLock(tmp_path).clock() < now + 1000


def test_a_folder_is_the_same_by_another_path(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with FolderLock(tmp_path / "run"), FolderLock(tmp_path / "link") as inner:
        inner.require_held()


def test_a_file_system_that_is_away_for_a_moment_costs_no_lock(tmp_path, monkeypatch, quick):  # noqa: F811
    with FolderLock(tmp_path) as lock:
        read, away = type(lock.path).read_text, []

        def failing(path, *arguments, **options):
            if path == lock.path and len(away) < 3:
                away.append(path)
                raise OSError(5, "Input/output error")
            return read(path, *arguments, **options)

        monkeypatch.setattr(type(lock.path), "read_text", failing)
        until(lambda: len(away) == 3)
        os.utime(lock.path, (1, 1))
        until(lambda: lock.path.stat().st_mtime > 1)
        lock.require_held()
