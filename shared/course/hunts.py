"""Floor 0. `course hunt`: list broken programs, copy one, check its repair, and ask which misconception it was."""

import ast

import click
from rich.console import Console

from shared.course.assignments import Hunt, find_hunts
from shared.course.errors import BrokenFile, CourseError
from shared.course.paths import find_workspace, shown
from shared.course.progress import Progress
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS, Line, Outcome, outcome_lines
from shared.course.reset import write
from shared.course.stubs import BodyFile
from shared.course.terminal import print_lines, say


def about(hunt: Hunt) -> list[Line]:
    """What the program is, and what it prints."""
    said = " ".join(ast.get_docstring(ast.parse(hunt.template)).split())
    done = "  (repaired)" if Progress(find_workspace()).passed(hunt.id) else ""
    printed = [Line(f"    {text}", hang=None) for text in hunt.symptom.rstrip("\n").split("\n")]
    return [Line(f"{hunt.letter}  {hunt.title}{done}", "bold"), Line(f"  {said}"), *printed, Line()]


def print_list(console: Console, number: str) -> None:
    """A chapter's hunts with their symptoms."""
    found = find_hunts(number)
    say(console, f"{len(found)} broken programs of chapter {number}. Find the line, mend it in your copy, say what it was.\n", "bold")
    print_lines(console, [line for hunt in found for line in about(hunt)])
    say(console, f"`{found[0].command}` makes your copy.")


def start(console: Console, hunt: Hunt) -> None:
    """Write the learner's copy, unless there is one, and say how to run and check it."""
    path = hunt.file(find_workspace())
    if not path.exists():
        write(path, hunt.template)
    steps = {"your copy": shown(path), "run": f"python {shown(path)}", "check": f"{hunt.command} --check"}
    print_lines(console, [*about(hunt), *(Line(f"  {label:<10} {text}", hang=11) for label, text in steps.items())])


def check(console: Console, hunt: Hunt, because: int | None) -> int:
    """Run a repaired program, then ask which misconception it was. Returns the exit code: 0, 1, or 2 for what is not done yet.

    Args:
        because: the choice, from 1; None asks for it on a terminal.
    """
    from shared.course import build_check  # it starts processes, which the other commands do not

    workspace = find_workspace()
    try:
        path = hunt.file(workspace)
        [outcome] = build_check.check_build(hunt, hunt.stages, BodyFile.read(path)) if path.exists() else [Outcome(hunt.id, NOT_ATTEMPTED)]
    except BrokenFile as error:
        outcome = Outcome(hunt.id, FAIL, problem=str(error).splitlines())
    if outcome.state == NOT_ATTEMPTED:
        outcome.problem = [f"`{hunt.command}` makes your copy, {shown(path)}. Nothing is mended in it yet."]
    if outcome.state != PASS or because is None:
        print_lines(console, [line for line in outcome_lines(outcome) if "`course hint" not in line.text])
    if outcome.state != PASS:
        return 2 if outcome.state == NOT_ATTEMPTED else 1
    if because is None:
        say(console, "\nThe repair is right. One question is still open: what was the mistake?")
        print_lines(console, [Line(f"  {number}  {choice}", hang=3) for number, choice in enumerate(hunt.choices, 1)])
        if not console.is_terminal:
            say(console, "\nThe hunt is done when you say which; until then the exit code is 2:\n")
            say(console, f"  {hunt.command} --check --because NUMBER")
            return 2
        because = click.prompt("number", type=click.IntRange(1, len(hunt.choices)))
        say(console, "")
    if because > len(hunt.choices):
        raise CourseError(f"There is no choice {because}: `{hunt.command} --check` lists the {len(hunt.choices)} of them.")
    right = because == hunt.answer
    if right or not Progress(workspace).passed(hunt.id):  # what was explained once stays so
        Progress(workspace).record_check(hunt.id, "repaired" if right else None)
    wrong = f"FAIL  The repair is right, but the mistake was not {because}: what did your repair change?"
    say(console, f"{hunt.id}  " + (f"PASS  {hunt.after}" if right else wrong))
    return 0 if right else 1
