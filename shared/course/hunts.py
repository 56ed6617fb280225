"""Floor 0. Bug hunts: small broken programs that a learner repairs, and says which misconception it was.

`solutions/hunts/NN_name/a.py` is the right program; `tests/exercises/hunts/NN_name.toml` has the edits that break it, its symptom and
the choices, `NN_name.py` the checks of a repair. The learner's copy, `chapters/NN_name/hunts/a.py`, is written when it is asked for.
"""

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
from rich.console import Console

from shared.course import build_check, running
from shared.course.errors import BrokenFile, CourseError
from shared.course.outcome import NOT_ATTEMPTED, PASS, Outcome
from shared.course.paths import CHECKOUT, find_workspace, shown
from shared.course.progress import Progress
from shared.course.reset import save, write
from shared.course.report import Line, outcome_lines
from shared.course.stubs import BodyFile
from shared.course.terminal import print_lines, say

FOLDER = CHECKOUT / "tests" / "exercises" / "hunts"
SECONDS = 60.0


@dataclass(frozen=True)
class Hunt:
    """One broken program. answer: which of the chapter's `choices` it is, from 1."""

    slug: str
    letter: str
    title: str
    symptom: str
    edits: tuple[tuple[str, str], ...]  # text of the right program, what stands there in the broken one
    answer: int
    because: str  # said after the right answer
    choices: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.slug[:2]}.hunt.{self.letter}"

    @property
    def solution_file(self) -> Path:
        return CHECKOUT / "solutions" / "hunts" / self.slug / f"{self.letter}.py"

    @property
    def broken(self) -> str:
        """The broken program's text."""
        text = self.solution_file.read_text(encoding="utf-8")
        for right, wrong in self.edits:
            if text.count(right) != 1:
                raise CourseError(f"{self.id}: {right!r} is {text.count(right)} times in {shown(self.solution_file)}, not once.")
            text = text.replace(right, wrong)
        return text

    def file(self, workspace: Path) -> Path:
        return workspace / "chapters" / self.slug / "hunts" / f"{self.letter}.py"


@cache
def hunts() -> dict[str, Hunt]:
    """Every hunt by its id."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        choices = tuple(entries["choices"])
        for entry in entries["hunt"]:
            edits = tuple((right, wrong) for right, wrong in entry.pop("edits"))
            found.append(Hunt(path.stem, edits=edits, choices=choices, **entry))
    return {hunt.id: hunt for hunt in found}


def of_chapter(number: str) -> list[Hunt]:
    """The hunts of a chapter.

    Raises:
        CourseError: it has none.
    """
    found = [hunt for hunt in hunts().values() if hunt.slug[:2] == number.zfill(2)[:2]]
    if not found:
        there = sorted({hunt.slug[:2] for hunt in hunts().values()})
        raise CourseError(f"Chapter {number} has no hunts. Chapters that have: {', '.join(there) or 'none'}.")
    return found


def find_hunt(number: str, letter: str) -> Hunt:
    found = {hunt.letter: hunt for hunt in of_chapter(number)}
    if letter not in found:
        raise CourseError(f"Chapter {number} has no hunt {letter!r}. There are: {', '.join(found)}.")
    return found[letter]


def print_list(console: Console, number: str) -> None:
    """A chapter's hunts with their symptoms."""
    progress, found = Progress(find_workspace()), of_chapter(number)
    say(console, f"{len(found)} broken programs of chapter {number}. Find the line, mend it in your copy, say what it was.", "bold")
    for hunt in found:
        done = "  (repaired)" if progress.passed(hunt.id) else ""
        print_lines(console, [Line(), Line(f"{hunt.letter}  {hunt.title}{done}", "bold"), *symptom_lines(hunt)])
    say(console, f"\n`course hunt {found[0].slug[:2]} {found[0].letter}` makes your copy.")


def symptom_lines(hunt: Hunt) -> list[Line]:
    """What the program is, and what it prints."""
    said = " ".join(ast.get_docstring(ast.parse(hunt.broken)).split())
    return [Line(f"  {said}"), *(Line(f"    {text}", hang=None) for text in hunt.symptom.rstrip("\n").split("\n"))]


def start(console: Console, hunt: Hunt) -> None:
    """Write the learner's copy, unless there is one, and say how to run and check it."""
    path = hunt.file(find_workspace())
    if not path.exists():
        write(path, hunt.broken)
    print_lines(console, [Line(f"{hunt.id}  {hunt.title}", "bold"), *symptom_lines(hunt), Line()])
    steps = {"your copy": shown(path), "run": f"python {shown(path)}", "check": f"course hunt {hunt.slug[:2]} {hunt.letter} --check"}
    print_lines(console, [Line(f"  {label:<10} {text}", hang=11) for label, text in steps.items()])


def check(console: Console, hunt: Hunt, because: int | None) -> int:
    """Run a repaired program, then ask which misconception it was. Returns the exit code: 0, 1, or 2 for what is not done yet.

    Args:
        because: the choice, from 1; None asks for it on a terminal.
    """
    workspace = find_workspace()
    path = hunt.file(workspace)
    try:
        mended = BodyFile.read(path) if path.exists() else None
    except BrokenFile as error:
        print_lines(console, outcome_lines(running.failed(hunt, str(error))))
        return 1
    if mended is None or ast.dump(mended.tree) == ast.dump(ast.parse(hunt.broken)):
        copy = f"`course hunt {hunt.slug[:2]} {hunt.letter}` makes your copy; mend {shown(path)}."
        outcome = Outcome(hunt.id, NOT_ATTEMPTED, problem=[copy])
    else:
        outcome = check_file(hunt, mended)
    lines = [line for line in outcome_lines(outcome) if "`course hint" not in line.text]
    print_lines(console, lines)
    if outcome.state != PASS:
        return 2 if outcome.state == NOT_ATTEMPTED else 1
    say(console, "\nThe program is repaired. What was the mistake?")
    print_lines(console, [Line(f"  {number}  {choice}", hang=3) for number, choice in enumerate(hunt.choices, 1)])
    if because is None and not console.is_terminal:
        say(console, f"\nSay which: `course hunt {hunt.slug[:2]} {hunt.letter} --check --because NUMBER`.")
        return 2
    because = because or click.prompt("number", type=click.IntRange(1, len(hunt.choices)))
    right = because == hunt.answer
    Progress(workspace).record_check(hunt.id, "repaired" if right else None)
    verdict = f"PASS  {hunt.because}" if right else f"FAIL  It was not {because}: what did your repair change?"
    say(console, f"\n{hunt.id}  {verdict}")
    return 0 if right else 1


def check_file(hunt: Hunt, file: BodyFile) -> Outcome:
    """Check a repaired program in a child process."""
    if line := running.solution_mentioned(file):
        return running.failed(hunt, f"{shown(file.path)}, line {line}: this reads the solution.")
    return running.run_apart(hunt, file, SECONDS, work=check_repair)


def check_repair(hunt_id: str, file: BodyFile, seconds: float, waiting: float) -> Outcome:
    """The work of the child process."""
    import torch

    from shared.course import binding

    torch.set_num_threads(1)
    hunt = hunts()[hunt_id]
    try:
        binding.choose("reference")
        checks = build_check.read_checks(FOLDER / f"{hunt.slug}.py")
        functions = build_check.load(file, ())
        running.limit(seconds, waiting)
        return build_check.run_stage(checks[hunt.letter], functions, {})
    except CourseError as error:
        return running.failed(hunt, str(error))


def status_lines(workspace: Path) -> list[Line]:
    """One line for each chapter's hunts."""
    record, lines = Progress(workspace).read(), []
    for slug in sorted({hunt.slug for hunt in hunts().values()}):
        letters = {hunt.letter: record.get(hunt.id, {}).get("passed") for hunt in hunts().values() if hunt.slug == slug}
        done = ", ".join(letter for letter, passed in letters.items() if passed)
        lines.append(Line(f"{slug[:2]}.hunt   {sum(map(bool, letters.values()))} of {len(letters)} repaired{f': {done}' if done else ''}"))
    return lines


def reset_hunt(hunt: Hunt, workspace: Path) -> str:
    """Put the broken program back, and keep the learner's text. Returns what was done."""
    path = hunt.file(workspace)
    kept = f" Your text is kept in {shown(save(workspace, hunt.id, path.read_bytes()))}." if path.exists() else ""
    write(path, hunt.broken)
    return f"{shown(path)} is broken again.{kept}"
