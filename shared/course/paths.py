"""Floor 0. Paths: the checkout that holds the course, and the workspace that holds the learner's files.

Usually they are one folder. A learner who keeps the work elsewhere copies `chapters/` there and runs the same
commands in that folder: the workspace is the nearest folder at or above the current one that has
`chapters/NN_name/exercises.py`, and the checkout where there is none.
"""

from pathlib import Path

from shared.course.errors import CourseError

CHECKOUT = Path(__file__).resolve().parents[2]


def is_workspace(folder: Path) -> bool:
    """Whether a learner's files are here, or were: a record of progress keeps a folder whose file was lost."""
    lost = (folder / ".course").is_dir() and any(folder.glob("chapters/[0-9][0-9]_*"))
    return lost or any(folder.glob("chapters/[0-9][0-9]_*/exercises.py"))


def find_workspace(start: Path | None = None) -> Path:
    """The folder whose `chapters/` holds the learner's files, seen from `start` (default: the current folder)."""
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if is_workspace(folder)), CHECKOUT)


def require_checkout() -> Path:
    """The checkout; refused with a sentence where the package was installed without its course."""
    if not (CHECKOUT / "chapters").is_dir():
        raise CourseError(
            f"The course's chapters are not next to its code ({CHECKOUT}). Clone the repository and run "
            "`make lab` in it: the package alone is not the course."
        )
    return CHECKOUT


def shown(path: Path) -> str:
    """`path` as a person wants to read it: relative to the current folder, the workspace or the checkout, if below."""
    for base in (Path.cwd(), find_workspace(), CHECKOUT):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return str(path)
