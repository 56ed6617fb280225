"""Chapter 01. Atomic writes, and a check before any work that the output folder can be written to.

Folders that must be whole, such as checkpoints, are chapter 04's (`shared.engine.checkpoint.atomic`).
"""

import os
from pathlib import Path

from shared.course.errors import CourseError


def require_writable(folder: Path) -> None:
    """Refuse an output folder before any work is done rather than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process of the run may have been faster
    except OSError as error:
        raise CourseError(f"The output folder {folder} cannot be written ({error.strerror}): give another output folder.") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, also when the process or the machine dies half way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
