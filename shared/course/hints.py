"""Floor 0. Hints and solutions: three hints, opened one by one; then the solution, which after a pass is shown next to the answer."""

import textwrap

from rich.console import Console
from rich.table import Table

from shared.course.catalogue import Exercise, chapter_of
from shared.course.errors import CourseError
from shared.course.progress import ALL_HINTS, Progress
from shared.course.report import Line, count
from shared.course.stubs import BodyFile, without_docstring
from shared.course.terminal import highlighted, print_lines, print_python, say

RUNGS = ("a question", "the idea", "a skeleton")
SIDE_BY_SIDE = 170  # columns that two functions need next to each other


def print_hint(console: Console, exercise: Exercise, progress: Progress, rung: int | None = None) -> None:
    """The next hint, or an opened one again.

    Args:
        rung: 1 to 3; None opens the next one, and repeats the last when all are open.

    Raises:
        CourseError: `rung` lies behind one that has not been read.
    """
    opened = progress.hints(exercise.id)
    wanted = rung or min(opened + 1, ALL_HINTS)
    if wanted > opened + 1:
        raise CourseError(f"Hint {wanted} comes after hint {opened + 1}, which you have not read: `course hint {exercise.id}` opens it.")
    say(console, f"{exercise.id}  hint {wanted} of {ALL_HINTS}: {RUNGS[wanted - 1]}", "bold")
    say(console)
    text = exercise.hints[wanted - 1].strip("\n")
    if wanted == ALL_HINTS:
        print_python(console, textwrap.indent(text, "  "))
    else:
        say(console, textwrap.indent(text, "  "))
    kept = progress.record_hint(exercise.id, wanted)
    say(console)
    if wanted < ALL_HINTS:
        say(console, f"  `course hint {exercise.id}` opens the next one." if kept else f"  {not_kept(progress)}")
    else:
        say(console, f"  That was the last hint. `course solution {exercise.id}` is open now." if kept else f"  {not_kept(progress)}")


def print_solution(console: Console, exercise: Exercise, progress: Progress) -> bool:
    """The solution, if it may be shown; otherwise what is missing. Returns whether it was shown."""
    if not progress.opened(exercise.id):
        left = ALL_HINTS - progress.hints(exercise.id)
        say(
            console,
            f"The solution of {exercise.id} opens after your answer has passed once, or after the third hint: {count(left, 'hint')} "
            f"to go. `course hint {exercise.id}` opens the next one.",
        )
        return False
    say(console, f"{exercise.id}  the course's solution", "bold")
    say(console)
    print_python(console, solution_text(exercise))
    return True


def not_kept(progress: Progress) -> str:
    return (
        f"Progress cannot be kept: {progress.folder} cannot be written. Copy the folder `chapters` to a place of your own "
        "and run the command there."
    )


def solution_text(exercise: Exercise) -> str:
    """The solution, with the docstring that says why it is written this way."""
    return BodyFile.read(chapter_of(exercise.id).solution_file).text(exercise.name)


def answer_text(exercise: Exercise, file: BodyFile) -> str:
    """The learner's function without the contract's docstring, which says nothing new after a pass."""
    node = file.function(exercise.name)
    if node is None or len(without_docstring(node)) in (0, len(node.body)):
        return file.text(exercise.name)
    docstring = node.body[0]
    return "\n".join(file.lines[node.lineno - 1 : docstring.lineno - 1] + file.lines[docstring.end_lineno : node.end_lineno])


def comparison_lines(answer: str, solution: str) -> list[Line]:
    """Both functions, one after the other, as plain lines that keep their own layout."""
    lines = []
    for heading, source in (("yours", answer), ("the course's", solution)):
        lines += [Line(), Line(f"  {heading}:", "bold"), *(Line(f"    {text}", hang=None) for text in source.split("\n"))]
    return lines


def print_comparison(console: Console, answer: str, solution: str) -> None:
    """Both functions: next to each other on a wide terminal, otherwise one after the other."""
    if not console.is_terminal or console.width < SIDE_BY_SIDE:
        print_lines(console, comparison_lines(answer, solution))
        return
    table = Table("yours", "the course's", box=None, padding=(1, 2, 0, 2), expand=True, header_style="bold")
    table.columns[0].ratio = table.columns[1].ratio = 1
    table.add_row(highlighted(answer), highlighted(solution))
    console.print(table)
