"""Chapter 01. The device that a run computes on (CPU, CUDA or MPS), and the output folder that it writes to, checked before any work."""

from pathlib import Path

import torch

from shared.course.errors import CourseError


def pick_device(asked: str) -> torch.device:
    """The device of this name, or for "auto" a GPU where there is one.

    Raises:
        CourseError: PyTorch finds no such device.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked != "auto":
        if not there[asked]:
            raise CourseError(f"PyTorch finds no {asked.upper()} device here: choose auto or cpu as device.")
        return torch.device(asked)
    return torch.device(next(name for name in ("cuda", "mps", "cpu") if there[name]))


def require_writable(folder: Path) -> None:
    """Refuse an output folder before any work is done rather than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process of the run may have been faster
    except OSError as error:
        raise CourseError(f"The output folder {folder} cannot be written ({error.strerror}): give another output folder.") from None
