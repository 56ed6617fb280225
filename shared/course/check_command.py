"""Floor 0. `course check`: run the checks of exercises and builds, keep what passed, show each outcome."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from shared.course import build_check, catalogue, released, running, status
from shared.course.assignments import Assignment, Stage, find_build, is_build
from shared.course.catalogue import Exercise
from shared.course.errors import BrokenFile, CourseError
from shared.course.hints import answer_text, not_kept, print_comparison, solution_text
from shared.course.paths import find_workspace, shown
from shared.course.progress import Progress
from shared.course.report import FAIL, NOT_ATTEMPTED, PASS, Line, Outcome, after_pass, count, outcome_lines
from shared.course.stubs import BodyFile
from shared.course.terminal import print_lines, say

EXIT_CODES = {PASS: 0, FAIL: 1, NOT_ATTEMPTED: 2}


def check(console: Console, names: tuple[str, ...], implementation: str, compare: bool) -> int:
    """Check what `names` means, builds first, and print it. Returns the exit code.

    Args:
        implementation: `mine` records what passed; `reference` checks the solutions and records nothing.
        compare: show answers that pass next to the solutions, also where several are checked.
    """
    whole = [name for name in names if is_build(name)]
    codes = [check_build(console, *find_build(name), implementation == "mine") for name in whole]
    others = tuple(name for name in names if name not in whole)
    if others or not names:
        codes.append(check_exercises(console, others, implementation == "mine", compare))
    return 1 if 1 in codes else max(codes)


def check_exercises(console: Console, names: tuple[str, ...], mine: bool, compare: bool) -> int:
    """Check the exercises that `names` means and print each outcome. Returns the exit code.

    Raises:
        CourseError: an unknown name, an unreadable record, or nothing to check.
    """
    exercises = catalogue.select(names)
    if not exercises:
        raise CourseError("There is nothing to check: the course has no exercises. `course doctor` looks for the reason.")
    workspace = find_workspace()
    progress = Progress(workspace)
    progress.read()  # an unreadable record is said before anything runs
    if sentence := released.edited_sentence():
        say(console, sentence, "yellow")
        say(console)
    outcomes, kept = [], True
    for exercise, outcome in run(console, exercises, workspace if mine else None):
        outcomes.append(outcome)
        kept &= not mine or keep(outcome, progress)
        print_lines(console, outcome_lines(outcome))
        if outcome.state == PASS and mine and (compare or len(exercises) == 1):
            show_pass(console, exercise, workspace)
        if len(exercises) > 1 and (outcome.state == FAIL or compare):
            say(console)
    if len(exercises) > 1:
        say(console, summary(outcomes), "bold")
    if not kept:
        say(console)
        say(console, not_kept(progress), "yellow")
    return exit_code(outcomes)


def check_build(console: Console, build: Assignment, stage: Stage | None, mine: bool) -> int:
    """Check a build, or one stage, and print each stage's outcome. Returns the exit code."""

    progress = Progress(find_workspace())
    say(console, f"{build.id}  {build.title}", "bold")
    path = build.file(find_workspace()) if mine else build.solution_file
    try:
        file = BodyFile.read(path)
    except BrokenFile as error:
        say(console, str(error) if path.exists() else f"{shown(path)} is missing. `course reset {build.id}` makes a new one.", "red")
        return 1
    outcomes: list[Outcome] = []
    for outcome in build_check.check_build(build, (stage,) if stage else build.stages, file):
        lines = outcome_lines(outcome)
        if outcome.state == FAIL and any(before.state == FAIL for before in outcomes):
            lines = [lines[0], Line(f"  `course check {outcome.exercise}` shows it.")]
        if outcome.state == NOT_ATTEMPTED:
            repeated = any(before.problem == outcome.problem for before in outcomes)
            of = next(each for each in build.stages if each.id == outcome.exercise)
            lines = [lines[0], Line(f"  {of.title}: about {of.minutes} minutes."), *([] if repeated else lines[1:])]
        print_lines(console, lines)
        outcomes.append(outcome)
        if mine and not keep(outcome, progress):
            say(console, not_kept(progress), "yellow")
    if stage is None:
        passed = sum(outcome.state == PASS for outcome in outcomes)
        say(console, f"{passed} of {count(len(outcomes), 'stage')} passed.", "bold")
        if passed == len(outcomes):
            say(console, f"\nTo think about: {build.after}\n\n`course solution {build.id}` shows another way to write it.")
    return exit_code(outcomes)


def run(console: Console, exercises: list[Exercise], workspace: Path | None) -> Iterator[tuple[Exercise, Outcome]]:
    """Check one exercise after the other, the learner's in `workspace` or the solutions, with a sign of life."""
    for exercise in exercises:
        with console.status(f"checking {exercise.id}") if console.is_terminal and not console.is_dumb_terminal else nullcontext():
            outcome = next(running.check_files([exercise], workspace) if workspace else running.check_solutions([exercise]))
        yield exercise, outcome


def keep(outcome: Outcome, progress: Progress) -> bool:
    """Record how a learner's check ended. False where that cannot be written."""
    if outcome.state == NOT_ATTEMPTED:
        return True
    return progress.record_check(outcome.exercise, outcome.fingerprint if outcome.state == PASS else None)


def show_pass(console: Console, exercise: Exercise, workspace: Path) -> Exercise | None:
    """After a pass: the answer next to the solution, the question, and the exercise that is open next, which is returned."""
    try:
        file = BodyFile.read(exercise.file(workspace))
        print_comparison(console, answer_text(exercise, file), solution_text(exercise))
    except BrokenFile:
        pass  # saved again since it was checked, and broken: the pass is kept, the new text is for the next check
    following = status.next_open(status.exercise_statuses(workspace), after=exercise)
    following = following if following != exercise else None  # itself, where the pass could not be recorded
    print_lines(console, after_pass(exercise, following))
    return following


def summary(outcomes: list[Outcome]) -> str:
    states = [outcome.state for outcome in outcomes]
    parts = [f"{states.count(state)} {words}" for state, words in ((PASS, "passed"), (FAIL, "failed"), (NOT_ATTEMPTED, "not attempted"))]
    return f"{count(len(states), 'exercise')} checked: {', '.join(parts)}."


def exit_code(outcomes: list[Outcome]) -> int:
    """1 if any check failed, otherwise 2 if any exercise is not attempted, otherwise 0."""
    states = {outcome.state for outcome in outcomes}
    return next(EXIT_CODES[state] for state in (FAIL, NOT_ATTEMPTED, PASS) if state in states)
