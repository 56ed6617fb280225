"""Floor 0. Hints and solutions: three hints, opened one by one; then the solution, which after a pass is shown next to the answer."""

import textwrap

from rich.console import Console
from rich.table import Table

from shared.course.assignments import Assignment, Stage
from shared.course.catalogue import Exercise
from shared.course.errors import CourseError
from shared.course.progress import ALL_HINTS, Progress
from shared.course.report import Line, count
from shared.course.stubs import BodyFile, without_docstring
from shared.course.terminal import highlighted, print_lines, print_python, say

RUNGS = ("a question", "the idea", "a skeleton")
SIDE_BY_SIDE = 170  # columns that two functions need next to each other


def open_stage(assignment: Exercise | Assignment, progress: Progress) -> Exercise | Stage | None:
    """The first stage that has not passed."""
    return next((stage for stage in assignment.stages if not progress.passed(stage.id)), None)


def print_hint(console: Console, stage: Exercise | Stage, progress: Progress, rung: int | None = None) -> None:
    """The next hint, or an opened one again.

    Args:
        rung: 1 to 3; None opens the next one, and repeats the last when all are open.

    Raises:
        CourseError: `rung` lies behind one that has not been read.
    """
    opened = progress.hints(stage.id)
    wanted = rung or min(opened + 1, ALL_HINTS)
    if wanted > opened + 1:
        raise CourseError(f"Hint {wanted} comes after hint {opened + 1}, which you have not read: `course hint {stage.id}` opens it.")
    say(console, f"{stage.id}  hint {wanted} of {ALL_HINTS}: {RUNGS[wanted - 1]}", "bold")
    say(console)
    text = textwrap.indent(stage.hints[wanted - 1].strip("\n"), "  ")
    if wanted == ALL_HINTS:
        print_python(console, text)
        following = f"That was the last hint. `course solution {stage.id}` is open now."
    else:
        say(console, text)
        following = f"`course hint {stage.id}` opens the next one."
    kept = progress.record_hint(stage.id, wanted)
    say(console, f"\n  {following if kept else not_kept(progress)}")


def print_solution(console: Console, assignment: Exercise | Assignment, stage: Exercise | Stage | None, progress: Progress) -> bool:
    """The solution, after every stage has passed once or after the third hint of `stage`; otherwise what is missing. Returns whether it was
    shown."""
    stage = stage or open_stage(assignment, progress)
    solved = all(progress.read().get(each.id, {}).get("solved") for each in assignment.stages)
    if not solved and stage is not None and progress.hints(stage.id) < ALL_HINTS:
        left = count(ALL_HINTS - progress.hints(stage.id), "hint")
        opens = f"The solution of {assignment.id} opens after"
        if isinstance(assignment, Exercise):
            also = f"your answer has passed once, or after the third hint: {left} to go. `course hint {stage.id}` opens the next one."
        else:
            also = f"all its stages have passed, or after the third hint of one: {stage.id} has {left} to go."
        say(console, f"{opens} {also}")
        return False
    say(console, f"{assignment.id}  the course's solution", "bold")
    say(console)
    print_python(console, solution_text(assignment))
    return True


def not_kept(progress: Progress) -> str:
    return (
        f"Progress cannot be kept: {progress.folder} cannot be written. Copy the folder `chapters` to a place of your own "
        "and run the command there."
    )


def solution_text(assignment: Exercise | Assignment) -> str:
    """The solution: of an exercise its function, with the docstring that says why it is written this way; else the whole file."""
    file = BodyFile.read(assignment.solution_file)
    return file.text(assignment.name) if isinstance(assignment, Exercise) else file.source.rstrip()


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
