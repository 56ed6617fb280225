"""Floor 0. Imports: large ones without garbage collection (`gc`), and optional packages, each in a group of pyproject.toml.

Torch's imports are half a million objects, all of which stay. The collector would look through them again and again while they are made,
for a tenth of the time that the import takes, and later at each full collection. A process that is forked from this one would copy their
memory, page by page, because looking writes counters into them.
"""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from shared.course.errors import CourseError


@contextmanager
def all_stays() -> Iterator[None]:
    """For imports at the start of a process: nothing is collected meanwhile, and what is there afterwards is never looked through.

    Where torch is imported already, which may be late in a process, all is as ever: then there may be garbage, too.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
