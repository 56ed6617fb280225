"""Floor 0. What helps a learner who is stuck, opened step by step: three hints, then the solution."""

import textwrap

from rich.console import Console

from shared.course.catalogue import Exercise
from shared.course.errors import CourseError
from shared.course.progress import ALL_HINTS, Progress
from shared.course.report import count
from shared.course.side_by_side import solution_text
from shared.course.terminal import print_python, say

RUNGS = ("a question", "the idea", "a skeleton")


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
