"""Floor 0. `course reset`: one function, a chapter's file, a build or a hunt, back as released. The old text is saved first."""

import time
from pathlib import Path

from shared.course.assignments import Assignment
from shared.course.catalogue import Chapter, Exercise
from shared.course.errors import CourseError
from shared.course.paths import shown
from shared.course.progress import Progress, replace_text
from shared.course.stubs import BodyFile, stub_file, stub_of


def reset_exercise(exercise: Exercise, workspace: Path) -> str:
    """Put the stub in place of one function; every other line of the file stays as it is. Returns what was done.

    Raises:
        BrokenFile: the file is missing or Python cannot read it, so the function cannot be found in it.
        CourseError: the old text or the new file cannot be written; the file is as it was.
    """
    path = exercise.file(workspace)
    file = BodyFile.read(path)
    stub = stub_of(exercise.contract).rstrip("\n")
    node = file.function(exercise.name)
    if node is None:
        write(path, f"{file.source.rstrip()}\n\n\n{stub}\n")
        return f"{shown(path)} had no function {exercise.name}: its stub is at the end of the file now."
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = file.lines
    old = "\n".join(lines[first - 1 : node.end_lineno])
    if old == stub:
        return f"{exercise.id} is untouched: there is nothing to reset."
    saved = save(workspace, exercise.id, f"{old}\n".encode())
    write(path, "\n".join([*lines[: first - 1], stub, *lines[node.end_lineno :]]))
    return f"{exercise.name} in {shown(path)} is a stub again. Your text is kept in {shown(saved)}."


def reset(assignment: Exercise | Assignment, workspace: Path) -> str:
    """Put an exercise's stub, or the released file of a build or a hunt, back. Returns what was done."""
    if isinstance(assignment, Exercise):
        return reset_exercise(assignment, workspace)
    path = assignment.file(workspace)
    if assignment.is_released(workspace):
        return f"{shown(path)} is untouched: there is nothing to reset."
    return reset_file(path, assignment.template, workspace, assignment.id, f"{assignment.id} as released")


def reset_chapter(chapter: Chapter, workspace: Path) -> str:
    """Put the whole file of stubs in place, whatever is in it. Returns what was done."""
    path, number = chapter.stub_file(workspace), chapter.number
    return reset_file(path, stub_file(chapter), workspace, number, f"the stubs of chapter {number}")


def reset_file(path: Path, text: str, workspace: Path, name: str, held: str) -> str:
    """Put the released file back, and keep the learner's text."""
    saved = save(workspace, name, path.read_bytes()) if path.exists() else None
    write(path, text)
    return f"{shown(path)} holds {held}." + (f" Your text is kept in {shown(saved)}." if saved else "")


def save(workspace: Path, name: str, content: bytes) -> Path:
    """Keep a learner's text in `.course/saved/`, under a name that no other text has."""
    folder = Progress(workspace).folder / "saved"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = (folder / f"{stamp}{extra}-{name}.py" for extra in ["", *(f".{i}" for i in range(2, 100))])
        path = next(path for path in names if not path.exists())
        path.write_bytes(content)
    except OSError as error:
        raise CourseError(f"Nothing was reset: your old text cannot be saved in {shown(folder)} ({error.strerror}).") from None
    return path


def write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise CourseError(f"{shown(path)} cannot be written ({error.strerror}). Is the folder yours to write in?") from None
