"""Floor 0. The outcome of a check, and its report: the same lines on the command line and in a notebook.

An outcome is plain data that travels between processes. A report is a list of lines, each with a style: `outcome_text` drops the styles
(notebooks, pipes, tests), the command hands the lines to the terminal. Nothing here depends on the clock, on progress or on where the
course is installed, so a notebook can store the text and compare it.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.course.catalogue import Exercise, all_exercises, chapter_of, find_exercise

PASS, FAIL, NOT_ATTEMPTED = "PASS", "FAIL", "NOT ATTEMPTED"
WIDTH = 100  # columns of plain text
LABEL = 10  # columns of "given     ", "expected  ", before the values
PRINTED_LINES = 15  # of what an answer printed
STYLES = {PASS: "bold green", FAIL: "bold red", NOT_ATTEMPTED: "bold yellow"}


@dataclass
class Outcome:
    """The result of one check.

    cases, of: how many of the check's cases ran, the failing one included.
    rung, title: where it failed.
    problem: lines that say what was given, what came out, what was expected and who says so.
    misconception: the sentence of the mutant that the answer coincides with.
    printed: what the answer printed, clipped.
    fingerprint: which answer of a learner's file was checked; empty for any other function.
    """

    exercise: str
    state: str
    cases: int = 0
    of: int = 0
    rung: str = ""
    title: str = ""
    problem: list[str] = field(default_factory=list)
    misconception: str = ""
    printed: str = ""
    seconds: float = 0.0
    fingerprint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Line:
    """One line of a report.

    text: what it says.
    style: how a terminal may show it.
    hang: the indent of its further lines, relative to the first, when it is too long; None leaves it in one piece, as code needs.
    """

    text: str = ""
    style: str = ""
    hang: int | None = 0

    def wrapped(self, width: int) -> list[str]:
        """The line cut at `width` columns."""
        if self.hang is None:
            return [self.text]
        margin = len(self.text) - len(self.text.lstrip())
        indent = " " * min(margin + self.hang, width // 2)
        return textwrap.wrap(self.text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def plain(lines: Iterable[Line], width: int = WIDTH) -> str:
    return "\n".join(part for line in lines for part in line.wrapped(width))


def outcome_text(outcome: Outcome, *, after: bool = True, comparison: Iterable[Line] = ()) -> str:
    """A check's outcome as plain text, without a final newline.

    Args:
        after: add the after-pass question and the exercise that is taught next, where the check passed.
        comparison: the answer next to the solution (`hints.comparison_lines`), shown where the check passed.
    """
    lines = outcome_lines(outcome)
    if outcome.state == PASS:
        exercise = find_exercise(outcome.exercise)
        lines += [*comparison, *(after_pass(exercise, following_exercise(exercise)) if after else [])]
    return plain(lines)


def outcome_lines(outcome: Outcome) -> list[Line]:
    """How a check ended, line by line."""
    lines = [headline(outcome)]
    if outcome.state == PASS:
        return lines
    if outcome.state == NOT_ATTEMPTED:
        return lines + [Line(f"  {text}") for text in outcome.problem or [where_to_write(find_exercise(outcome.exercise))]]
    lines += [Line(f"  {outcome.title}")] if outcome.title else []
    lines += [Line()] + [problem_line(text) for text in outcome.problem]
    if outcome.misconception:
        lines += [Line(), Line(f"  {outcome.misconception}", "bold")]
    if outcome.printed.strip():
        lines += [Line(), Line("  Your code printed:"), *printed_lines(outcome.printed.rstrip().splitlines())]
    if outcome.rung:  # a file that does not load needs no hint about the exercise
        lines += [Line(), Line(f"  Stuck? `course hint {outcome.exercise}` opens the next of three hints.")]
    return lines


def headline(outcome: Outcome) -> Line:
    text = f"{outcome.exercise}  {outcome.state}"
    if outcome.state == PASS:
        text += f"  ({count(outcome.cases, 'case')})"
    elif outcome.rung:
        text += f"  case {outcome.cases} of {outcome.of}, {outcome.rung}"
    return Line(text, STYLES[outcome.state])


def problem_line(text: str) -> Line:
    """A line of `Outcome.problem`: a label and a value, or a sentence."""
    label = text[:LABEL]
    style = {"came out": "red", "missing": "red", "raised": "red", "expected": "green"}.get(label.strip(), "")
    return Line(f"  {text}", style, hang=LABEL if label.endswith("  ") and label.strip() else 0)


def printed_lines(printed: list[str]) -> list[Line]:
    """The beginning of what an answer printed, and its end, where a clipped output says how long it was."""
    if len(printed) > PRINTED_LINES:
        printed = [*printed[: PRINTED_LINES - 2], "...", printed[-1]]
    return [Line(f"    {harmless(text)}", "dim") for text in printed]


def harmless(text: str) -> str:
    """Printed text with what would move the cursor or change colours written out."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text.expandtabs())


def where_to_write(exercise: Exercise) -> str:
    file = f"chapters/{chapter_of(exercise.id).slug}/exercises.py"
    return f"Write the body of `{exercise.name}` in {file} (about {exercise.minutes} min)."


def after_pass(exercise: Exercise, following: Exercise | None) -> list[Line]:
    """What to think about after a pass, and what to do next."""
    lines = [Line(), Line(f"  To think about: {exercise.after}")]
    if following:
        lines += [Line(), Line(f"  Next: {following.id} ({following.title}, {following.minutes} min).")]
    return lines


def following_exercise(exercise: Exercise) -> Exercise | None:
    """The exercise that is taught after this one."""
    taught = list(all_exercises().values())
    place = taught.index(exercise)
    return taught[place + 1] if place + 1 < len(taught) else None


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural where there are several."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
