"""Floor 0. A learner's answer and the course's solution, to be read against each other after a pass."""

from rich.console import Console
from rich.table import Table

from shared.course.catalogue import Exercise, chapter_of
from shared.course.report import Line
from shared.course.stubs import BodyFile, without_docstring
from shared.course.terminal import highlighted, print_lines

SIDE_BY_SIDE = 170  # columns from which two functions fit beside each other


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
    """Both functions: beside each other on a wide terminal, otherwise one after the other."""
    if not console.is_terminal or console.width < SIDE_BY_SIDE:
        print_lines(console, comparison_lines(answer, solution))
        return
    table = Table("yours", "the course's", box=None, padding=(1, 2, 0, 2), expand=True, header_style="bold")
    table.columns[0].ratio = table.columns[1].ratio = 1
    table.add_row(highlighted(answer), highlighted(solution))
    console.print(table)
