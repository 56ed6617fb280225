"""The disk of build 04: kills at each file operation, in the middle of a file, and what a power cut leaves.

File operations are noticed by Python's audit events, whichever function of os, pathlib, shutil or tempfile makes them; files that a library
of another language writes are torn by a limit of the kernel on a file's size. A kill is real: a forked child ends itself with `os._exit`.
"""

import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KILLED, RAISED, TOLD = 77, 78, 79
OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Listener = Callable[[str, int], None]  # of an operation that is about to happen: its name, and the descriptor of what is forced


def listeners() -> list[Listener]:
    """Who hears of file operations in this process. Hooks stay for ever, so there is one, which mostly finds nobody."""
    if not hasattr(os.fsync, "listeners"):
        heard: list[Listener] = []
        force = os.fsync

        def fsync(descriptor: Any) -> None:
            for listener in list(heard):
                listener("os.fsync", descriptor if isinstance(descriptor, int) else descriptor.fileno())
            force(descriptor)
            for listener in list(heard):
                listener("forced", descriptor if isinstance(descriptor, int) else descriptor.fileno())

        def audit(event: str, values: tuple) -> None:
            if heard and (event in OPERATIONS or (event == "open" and isinstance(values[2], int) and values[2] & WRITING)):
                for listener in list(heard):
                    listener(event, -1)

        fsync.listeners, fsync.force = heard, force
        os.fsync = fsync
        sys.addaudithook(audit)
    return os.fsync.listeners


listeners()  # before a learner's file says `from os import fsync`


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    heard = listeners()
    heard.append(listener)
    try:
        yield
    finally:
        heard.remove(listener)


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child, which ends without any clean-up. Returns its exit code; 0 where it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(RAISED)
        finally:
            os._exit(RAISED)
    status = os.waitpid(child, 0)[1]
    return KILLED if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ else os.waitstatus_to_exitcode(status)


def operations_of(work: Callable[[], None]) -> list[str]:
    """The file operations of `work`, in this process."""
    found: list[str] = []
    with hearing(lambda event, _: found.append(event) if event != "forced" else None):
        work()
    return found


def killing_at(number: int, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, ended with the process right before its file operation of that number, from 0."""

    def ended() -> None:
        count = 0

        def listener(event: str, _: int) -> None:
            nonlocal count
            if event != "forced":
                if count == number:
                    os._exit(KILLED)
                count += 1

        with hearing(listener):
            work()

    return ended


def torn_at(size: int, work: Callable[[], None]) -> Callable[[], None]:
    """`work`, ended by the kernel where a file would become larger than so many bytes."""

    def ended() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        work()

    return ended


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files cannot become larger than so many bytes: a write raises. Use it in a child."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def bytes_in(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*") if folder.exists() else ():
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            pass
    return found


@contextmanager
def somewhere() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve() / "runs" / "mine"


# Power cuts

Names = dict[str, int]


def removals_alone(forced: Names, now: Names) -> Names:
    """What was renamed has its old name."""
    return {name: number for name, number in forced.items() if name in now or number in now.values()}


WAYS: tuple[Callable[[Names, Names], Names], ...] = (
    lambda forced, now: now,
    lambda forced, now: forced,
    lambda forced, now: {name: number for name, number in forced.items() if number not in now.values()} | now,
    removals_alone,
)
Image = frozenset  # of (path, bytes or None for a folder)


class Disk:
    """What a disk would have of a folder: contents and names as they were when they were last forced, which begins with all of them.

    Files and folders are known by numbers of our own, because a file system gives the number of a removed file to the next one.
    """

    def __init__(self, folder: Path):
        self.folder, self.numbers, self.count = folder, {}, 0
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.images: set[Image] = set()
        current = self.scan()
        for path, number in current.items():
            self.keep(path, number, current)

    def scan(self) -> dict[Path, int]:
        """The number of everything that is there now."""
        found, numbers = {}, {}
        for path in [self.folder, *sorted(self.folder.rglob("*"))] if self.folder.exists() else []:
            inode = path.lstat().st_ino
            if inode not in self.numbers:
                self.count += 1
            numbers[inode] = self.numbers.get(inode, self.count)
            self.numbers.setdefault(inode, self.count)
            found[path] = numbers[inode]
        self.numbers = numbers  # what is gone is forgotten: its number in the file system may come again
        return found

    def keep(self, path: Path, number: int, current: dict[Path, int]) -> None:
        if path.is_dir():
            self.names[number] = {other.name: own for other, own in current.items() if other.parent == path and other != path}
        else:
            self.contents[number] = path.read_bytes()

    def listener(self, event: str, descriptor: int) -> None:
        current = self.scan()
        if event == "forced":
            inode = os.fstat(descriptor).st_ino
            for path, number in current.items():
                if path.lstat().st_ino == inode:
                    self.keep(path, number, current)
        self.cut(current)

    def cut(self, current: dict[Path, int] | None = None) -> list[Image]:
        """What a power cut could leave now: of the changes to names since they were forced all, none, the removals or the others."""
        current = self.scan() if current is None else current
        now: dict[int, dict[str, int]] = {number: {} for path, number in current.items() if path.is_dir()}
        for path, number in current.items():
            if path != self.folder:
                now[current[path.parent]][path.name] = number
        root, found = current.get(self.folder), []
        for top in WAYS:
            for inner in WAYS:
                ways = {number: top if number == root else inner for number in self.names.keys() | now.keys()}
                names = {number: way(self.names.get(number, {}), now.get(number, {})) for number, way in ways.items()}
                found.append(frozenset(self.listed(root, names, "")) if root else frozenset())
        self.images.update(found)
        return found

    def listed(self, folder: int, names: dict[int, dict[str, int]], prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, number in names.get(folder, {}).items():
            if number in names:
                yield f"{prefix}{name}", None
                yield from self.listed(number, names, f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", self.contents.get(number, b"")


def write_image(image: Image, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, content in sorted(image, key=lambda entry: entry[0]):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
