"""Chapter 04. A tracker's package is imported when a run starts with that tracker, and missed in one sentence."""

import importlib
from typing import Any

from shared.course.errors import CourseError


def require(module: str, package: str) -> Any:
    """Import `module`.

    Args:
        package: what to install where it is missing.

    Raises:
        CourseError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CourseError(
            f"This tracker needs the package {package}, which is not installed ({error}): "
            f"`pip install {package}`, or leave the tracker out."
        ) from None
