"""Chapter 01. Atomic writes, a full disk as a sentence, and a check before any work that the output folder can be written to.

Folders that must be complete, such as checkpoints, are chapter 04's (`shared.engine.checkpoint.atomic`).
"""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shared.course.errors import CourseError


def require_writable(folder: Path) -> None:
    """Refuse an output folder before any work is done rather than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process of the run may have been faster
    except OSError as error:
        raise CourseError(f"The folder {folder} cannot be written to ({error.strerror}): give another one.") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which a full disk, or any other error of the operating system, is an error message that names the file or folder `path`.

    Raises:
        CourseError: what is written within it cannot be.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if (reason := system_reason(error)) is None:
            raise
        raise CourseError(
            f"{path} cannot be written ({reason}): free space there or move what is in its way, and give the same command again."
        ) from error


def system_reason(error: Exception) -> str | None:
    """The operating system's error message, also of an error of the safetensors library; None for any other cause."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"(?:I/O error|IoError)\W+(.*?) \(os error", str(error))
    return found and found[1]


def remove_left_over(folder: Path, name: str = "*") -> None:
    """Remove what processes that were killed within `write_atomically` left in and below a folder; of a file, beside its place.

    Args:
        name: of the file; every file, at any depth, unless given.
    """
    for partial in folder.rglob("*.partial") if name == "*" else folder.glob(f"{glob.escape(name)}.*.partial"):
        owner = partial.name.split(".")[-2]
        if owner.isdecimal() and partial.is_file() and not runs(int(owner)):
            partial.unlink(missing_ok=True)


def runs(process: int) -> bool:
    """Whether this machine has a process of this number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: complete or not at all, even if the process or the machine dies meanwhile."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)  # or half of it would take the room that the next attempt needs
            raise
