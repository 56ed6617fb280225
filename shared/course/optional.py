"""Floor 0. Packages that only one command needs: pyproject.toml names them in a group of their own, and they are imported when used."""

import importlib
from types import ModuleType

from shared.course.errors import CourseError


def require(module: str, group: str, purpose: str) -> ModuleType:
    """Import `module`.

    Args:
        group: of pyproject.toml, which installs it.
        purpose: what needs it, as the subject of a sentence: "Fitting a scaling law".

    Raises:
        CourseError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise CourseError(f"{purpose} needs {package}, which is not installed ({error}): `make install GROUP={group}`.") from None
