"""Chapter 03. A lock file (flock and heartbeat) for a folder into which one process at a time may write, on one machine and on several.

    with FolderLock(output):                    FolderInUse, with the other process in its sentence, while another one holds it

The file `run.lock` says who holds the folder. Whether that process is still there is decided by two things:

    flock                   The kernel grants it to one process, and takes it back when that process ends in whatever way: kill -9, a crash.
                            It needs no clock and no process id, which another process may have by now. It holds among the processes
                            of one machine, and among machines where the file system carries it, as NFS does.
    modification time       Touched every few seconds by a thread. It decides where flock was granted (or does not exist) and another
                            machine, or this one before it was started again, wrote the file: touched, the holder lives; a minute old by
                            the file system's own clock, it is gone.

Two machines that start in the same second, on a file system that carries no locks, may both get the folder: the one that wrote first
reads the other's name at its next heartbeat, as a process does that was stopped for minutes, and `require_held` ends its run.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from shared.course.errors import CourseError
from shared.output_files import require_writable

NAME = "run.lock"
FIRST_BEAT, BEAT, STALE = 1.0, 5.0, 60.0  # seconds: until the first heartbeat, between two, without one until a holder counts as gone
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for each start of a kernel, the same in all of its containers
HELD: dict[tuple[Path, int], "FolderLock"] = {}  # by file and thread


class FolderInUse(CourseError):
    """Another process holds the folder; the message says which, where, since when, and what to do."""


class FolderLock:
    """Holds a folder for this process. The thread that holds it may take it again, as the engine does inside the trainer.

    Args:
        folder: made if it is missing.
        wait: whether to wait for another holder, instead of raising.
        say: called with a sentence before it waits.
    """

    def __init__(self, folder: Path, wait: bool = False, say: Callable[[str], None] = lambda sentence: None):
        self.folder, self.path, self.wait, self.say = folder, folder / NAME, wait, say
        self.key = self.path.resolve(), threading.get_ident()
        self.content, self.process = "", os.getpid()
        self.handle: int | None = None
        self.outer: FolderLock | None = None
        self.lost: str | None = None
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.beat, name="folder lock", daemon=True)

    def __enter__(self) -> "FolderLock":
        """
        Raises:
            FolderInUse: another process has the folder.
            CourseError: the folder cannot be written to.
        """
        self.outer = HELD.get(self.key)
        if self.outer is not None:
            return self
        told = False
        while self.handle is None:
            try:
                self.take()
            except FolderInUse as error:
                if not self.wait:
                    raise
                if not told:
                    self.say(f"{error} Waiting for it.")
                told = True
                time.sleep(FIRST_BEAT)
            except OSError as error:
                cure = "free space there, move what is in its way, or give another folder"
                raise CourseError(f"{self.path} cannot be written ({error.strerror}): {cure}.") from None
        HELD[self.key] = self
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.outer is not None or self.process != os.getpid():  # a forked child that ends leaves its parent's lock alone
            return
        self.closing.set()
        self.thread.join()
        del HELD[self.key]
        with suppress(OSError):
            if self.path.read_text(encoding="utf-8") == self.content:
                self.path.unlink()
        os.close(self.handle)
        self.handle = None

    def require_held(self) -> None:
        """
        Raises:
            FolderInUse: another process has taken the folder since.
        """
        if lost := (self.outer or self).lost:
            raise FolderInUse(lost)

    def take(self) -> None:
        """Acquire the lock, and write its holder into the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                carried, holder = self.granted(handle), self.holder()
                if holder and not (carried and holder["boot"] == boot()):
                    self.wait_until_stale(holder)
                if not same_file(self.path, handle):  # its holder removed it since our first call
                    raise FileNotFoundError
                content = json.dumps(myself())
                os.pwrite(handle, content.encode(), 0)
                os.ftruncate(handle, len(content.encode()))
                os.fsync(handle)
                break
            except FileNotFoundError:
                os.close(handle)
            except BaseException:
                os.close(handle)
                raise
        if self.handle is not None:
            os.close(self.handle)
        self.handle, self.content = handle, content

    def granted(self, handle: int) -> bool:
        """Whether the kernel granted the lock; False if the file system has no locks."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(self.sentence(self.holder())) from None
        except OSError:
            return False
        return True

    def wait_until_stale(self, holder: dict[str, Any]) -> None:
        """Return when the file is old enough; raise where its holder touches it, and FileNotFoundError where its holder has removed it."""
        before, told = self.seen(), False
        while (age := self.clock() - before[0]) < STALE:
            if not told:
                self.say(f"{self.sentence(holder)} It was last seen {age:.0f} s ago: waiting at most {STALE - age:.0f} s for a sign of it.")
            told = True
            time.sleep(FIRST_BEAT)
            if self.seen() != before:
                raise FolderInUse(self.sentence(self.holder()))

    def seen(self) -> tuple[float, str]:
        """Modification time and content. Opened for each look, because network file systems ask their server at an open."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            return os.fstat(file.fileno()).st_mtime, file.read()

    def clock(self) -> float:
        """The file system's own time, which on a network is the server's."""
        probe = self.path.with_name(f".{NAME}.{uuid4().hex}")
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def holder(self) -> dict[str, Any] | None:
        """The holder that the file names; None if it is empty or was half written in a crash."""
        try:
            holder = json.loads(self.path.read_bytes())
            return holder if holder.keys() >= myself().keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def sentence(self, holder: dict[str, Any] | None) -> str:
        if holder is None:
            return f"{self.folder} is in use by another process that has just begun: wait for it, or give another output folder."
        job = f" (job {holder['job']})" if holder["job"] else ""
        gone = f", or delete {self.path} if that machine is gone" if holder["host"] != socket.gethostname() else ""
        return (
            f"{self.folder} is in use by process {holder['pid']} on {holder['host']}{job} since {holder['since']}: "
            f"wait for it, stop it, or give another output folder{gone}."
        )

    def beat(self) -> None:
        """Touch the file while this process holds it; runs in the thread."""
        for pause in chain([FIRST_BEAT], repeat(BEAT)):
            if self.closing.wait(pause):
                return
            try:
                if self.path.read_text(encoding="utf-8", errors="replace") == self.content:
                    os.utime(self.path)
                    continue
                self.lost = f"This run has lost its folder. {self.sentence(self.holder())}"
                return
            except FileNotFoundError:  # somebody deleted it
                with suppress(OSError, FolderInUse):
                    self.take()
            except OSError:  # the file system is away: the next beat may find it again
                continue


@contextmanager
def held_folder(folder: Path, leads: bool, console: Console) -> Iterator[FolderLock]:
    """A run's folder within a `with` block: it can be written to, and the rank that leads those who share it holds its lock.

    Raises:
        CourseError: it cannot be written to, or another run is in it.
    """
    require_writable(folder)
    lock = FolderLock(folder, say=lambda sentence: console.print(sentence, markup=False, highlight=False))
    with lock if leads else nullcontext():
        yield lock


def is_held(folder: Path) -> bool:
    """Whether a process seems to hold a folder, by its heartbeat; asked without a lock of its own, which a run that begins would meet."""
    try:
        return abs(time.time() - (folder / NAME).stat().st_mtime) < 3 * BEAT
    except OSError:
        return False


def same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def boot() -> str:
    """An identifier of this boot of this machine."""
    return BOOT.read_text(encoding="utf-8").strip() if BOOT.exists() else socket.gethostname()


def myself() -> dict[str, Any]:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's own variable
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    return {
        "pid": os.getpid(), "host": socket.gethostname(), "since": since, "job": None if job == "none" else job,
        "boot": boot(), "token": uuid4().hex,
    }  # fmt: skip


def close_in_child() -> None:
    """A forked child must not keep its parent's lock when the parent is killed."""
    for lock in HELD.values():
        os.close(lock.handle)
    HELD.clear()


os.register_at_fork(after_in_child=close_in_child)
