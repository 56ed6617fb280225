"""Chapter 04. Atomic save: a crash at any moment leaves the old state or the new one, never half of one.

A file system promises one thing that is atomic: renaming to a free name. So a checkpoint is written under another name beside
its place, forced onto the disk, and renamed at the end. What a killed process leaves behind has a name that no reader looks for.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shared.course.binding import exercise

PARTIAL = ".partial"  # how the name of an unfinished folder ends


def force_to_disk(path: Path) -> None:
    """Flush a file or a folder from the operating system's cache to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(source: Path, target: Path) -> None:
    """Give `source` the name `target`, in place of a folder that has it.

    No call of the operating system swaps two folders everywhere, so there is a moment in which neither has the name: a process that is
    killed just then leaves the old one as `target.old`. Checkpoints never replace one another; each has its step in its name.
    """
    if not target.exists():
        source.rename(target)
        return
    aside = target.with_name(target.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    source.rename(target)
    shutil.rmtree(aside)


@exercise("04.atomic_save")
def atomic_save(target: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `target` complete, or leave no trace of the attempt.

    Args:
        target: the folder to make. Where it exists already, it is replaced at the end, and stays as it is until then.
        write: write(folder) puts the files into the folder that it is given: an empty one beside `target` whose name is
            target's with ".partial" after it. One that a killed process left there is removed first.

    Every file and folder in it, at any depth, and the partial folder itself must be on the disk (`force_to_disk`) before the folder
    gets its name, and the folder that holds the name afterwards. Where `write` or the forcing raises, the partial folder is removed
    and the error goes on.

    >>> atomic_save(Path("step-7"), lambda folder: (folder / "weights").write_text("new"))
    >>> sorted(Path().iterdir())
    [PosixPath('step-7')]
    """
