"""Run every edit of a chapter's solutions against its check, and say which were noticed.

    python tests/support/mutation.py 01                  the edits that survive, and a summary
    python tests/support/mutation.py 01 --all            every edit with its verdict
    python tests/support/mutation.py 01.evaluate --all   of one exercise
"""

import argparse
import importlib
import signal
import time
import tomllib
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from children import EndedItsProcess, in_child
from edits import Edit, edits_of

from shared.course import binding, catalogue, running
from shared.course.errors import BrokenFile
from shared.course.judging import Judge
from shared.course.paths import CHECKOUT
from shared.course.report import PASS
from shared.course.stubs import BodyFile

SURVIVORS = CHECKOUT / "tests" / "exercises" / "mutants" / "survivors.toml"
SECONDS_EACH = 5  # of computing; a check takes under one
WAITING_EACH = 60  # seconds on the clock, for an edit that waits and computes nothing; the machine may be busy
LOOKS_EVERY = 0.25  # seconds
ALIVE, NOTICED, STUCK = "ALIVE", "noticed", "stuck"


class TookTooLong(BaseException):
    """An edit that made a loop endless. No `except Exception` of a check stops it."""


@dataclass(frozen=True)
class Verdict:
    """How the check of an exercise judged one edit of its solution.

    state: ALIVE where every case passed, NOTICED, or STUCK where the time ran out, which a learner is told as well.
    case: the case that noticed it.
    """

    edit: Edit
    state: str
    case: str = ""


@dataclass(frozen=True)
class Survivor:
    """Edits of one line that may live, with the reason."""

    before: str
    after: list[str]
    reason: str


def survivors_of(exercise_id: str) -> list[Survivor]:
    """The edits of an exercise's solution that may live. The file has a table for each reason."""
    reasons = tomllib.loads(SURVIVORS.read_text(encoding="utf-8"))
    listed = [(reason, lines.get(exercise_id, {})) for reason, lines in reasons.items()]
    return [Survivor(before, after, reason) for reason, lines in listed for before, after in lines.items()]


def verdicts_of(exercise_id: str) -> list[Verdict]:
    """The verdict on every edit of an exercise's solution, tried in a child process."""
    source = catalogue.chapter_of(exercise_id).solution_file.read_text(encoding="utf-8")
    edits = [edit for edit in edits_of(source) if edit.function == exercise_id.split(".", 1)[1]]
    return tried(exercise_id, edits)


def tried(exercise_id: str, edits: list[Edit]) -> list[Verdict]:
    """The verdicts, in child processes: what comes after an edit that got stuck is tried in another one, because a thread of that edit may
    compute for ever. An edit that ends the process, by reading memory that was let go, is looked for by halves: a learner is told of that
    as well."""
    found: list[Verdict] = []
    while len(found) < len(edits):
        rest = edits[len(found) :]
        try:
            found += in_child(try_edits, exercise_id, rest, seconds=120 + 10 * len(rest))
        except EndedItsProcess:
            half = len(rest) // 2
            if half == 0:
                return [*found, Verdict(rest[0], NOTICED, "it ends the process")]
            found += tried(exercise_id, rest[:half]) + tried(exercise_id, rest[half:])
    return found


def try_edits(exercise_id: str, edits: list[Edit]) -> list[Verdict]:
    """The verdicts up to the first edit that got stuck."""
    torch.set_num_threads(1)
    binding.choose("reference")
    exercise = catalogue.find_exercise(exercise_id)
    core = importlib.import_module(exercise.contract.module)
    judge = Judge(running.read_check(exercise), {})
    judge.judge(getattr(core, exercise.name))  # what a first run imports and keeps must not be the first edit's time
    verdicts: list[Verdict] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a number is an edit like any other
        for edit in edits:
            verdicts.append(try_edit(judge, exercise, edit))
            if verdicts[-1].state == STUCK:
                break
    return verdicts


def try_edit(judge: Judge, exercise, edit: Edit) -> Verdict:
    computed, began = time.process_time(), time.monotonic()

    def look(number, frame) -> None:
        if time.process_time() - computed > SECONDS_EACH or time.monotonic() - began > WAITING_EACH:
            raise TookTooLong

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOKS_EVERY, LOOKS_EVERY)
    try:
        module = ModuleType("course_edited")
        binding.execute(BodyFile.parsed(catalogue.chapter_of(exercise.id).solution_file, edit.source), module)
        outcome = judge.judge(getattr(module, exercise.name))
    except BrokenFile:
        return Verdict(edit, NOTICED, "the file cannot be loaded")
    except TookTooLong:
        return Verdict(edit, STUCK)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Verdict(edit, ALIVE) if outcome.state == PASS else Verdict(edit, NOTICED, f"{outcome.rung}: {outcome.title}")


def table(verdicts: list[Verdict]) -> str:
    rows = [("operator", "line", "edit", "verdict")]
    for verdict in verdicts:
        edit = verdict.edit
        rows.append((edit.operator, str(edit.line), f"{edit.before}  ->  {edit.after}", f"{verdict.state}  {verdict.case}".rstrip()))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[3]}\n{'':{sum(widths) + 4}}{row[2]}" for row in rows)


def summary(found: dict[str, list[Verdict]]) -> str:
    lines = [f"{'exercise':28}{'edits':>7}{'noticed':>9}{'stuck':>7}{'alive':>7}"]
    total = Counter()
    for exercise_id, verdicts in found.items():
        states = Counter(verdict.state for verdict in verdicts)
        total += states
        lines.append(f"{exercise_id:28}{len(verdicts):7}{states[NOTICED]:9}{states[STUCK]:7}{states[ALIVE]:7}")
    lines.append(f"{'all':28}{total.total():7}{total[NOTICED]:9}{total[STUCK]:7}{total[ALIVE]:7}")
    return "\n".join([*lines, f"{total[ALIVE] / total.total():.1%} alive"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Edit the solutions in every small way and see which edits their checks notice.")
    parser.add_argument("names", nargs="*", metavar="NN[.name]", help="chapters or exercises; none for all")
    parser.add_argument("--all", action="store_true", help="show the edits that were noticed too")
    options = parser.parse_args()
    found = {}
    for exercise in catalogue.select(tuple(options.names)):
        verdicts = found[exercise.id] = verdicts_of(exercise.id)
        shown = [verdict for verdict in verdicts if options.all or verdict.state == ALIVE]
        if shown:
            print(f"{exercise.id}\n{table(shown)}\n")
    print(summary(found))


if __name__ == "__main__":
    main()
