"""Floor 0. `course status` and `course next`: the state of exercises, builds and hunts, from the learner's files as they are now and the
record of past checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.course import catalogue
from shared.course.assignments import builds, find_hunts, fingerprint, hunts
from shared.course.catalogue import Chapter, Exercise
from shared.course.errors import BrokenFile
from shared.course.hints import open_stage
from shared.course.paths import shown
from shared.course.progress import Progress
from shared.course.report import Line, count
from shared.course.stubs import BodyFile
from shared.course.terminal import say

PASSED, CHANGED, ATTEMPTED = "passed", "changed since it passed", "attempted"
UNTOUCHED, UNREADABLE = "not attempted", "file cannot be read"
STYLES = {PASSED: "green", CHANGED: "yellow", ATTEMPTED: "yellow", UNTOUCHED: "dim", UNREADABLE: "red"}
NARROW = 80  # columns below which the table keeps only what matters most


@dataclass(frozen=True)
class ExerciseStatus:
    """The status of one exercise: `state` is one of the five words above."""

    exercise: Exercise
    state: str
    hints: int

    @property
    def passed(self) -> bool:
        return self.state == PASSED


def exercise_statuses(workspace: Path) -> list[ExerciseStatus]:
    """Every exercise in teaching order."""
    record = Progress(workspace).read()
    return [status for chapter in catalogue.chapters().values() for status in chapter_statuses(chapter, workspace, record)]


def chapter_statuses(chapter: Chapter, workspace: Path, record: dict[str, dict]) -> list[ExerciseStatus]:
    try:
        file = BodyFile.read(chapter.stub_file(workspace))
    except BrokenFile:
        file = None
    found = []
    for exercise in chapter.exercises:
        kept = record.get(exercise.id, {})
        found.append(ExerciseStatus(exercise, state_of(exercise, chapter, file, kept.get("passed")), kept.get("hints", 0)))
    return found


def state_of(exercise: Exercise, chapter: Chapter, file: BodyFile | None, passed: str | None) -> str:
    if file is None:
        return UNREADABLE
    if not file.attempted(exercise):
        return UNTOUCHED
    if passed is None:
        return ATTEMPTED
    return PASSED if passed == file.fingerprint(exercise, chapter) else CHANGED


def next_open(found: Sequence[ExerciseStatus], after: Exercise | None = None) -> Exercise | None:
    """The first exercise that has not passed: from `after` on if given, and again from the beginning."""
    ids = [status.exercise.id for status in found]
    start = ids.index(after.id) + 1 if after else 0
    return next((status.exercise for status in [*found[start:], *found[:start]] if not status.passed), None)


def next_lines(exercise: Exercise, workspace: Path) -> list[Line]:
    """What to do about an exercise: where to write it, where to read about it, how to check it.

    Raises:
        BrokenFile: the learner's file is missing or Python cannot read it.
    """
    path = exercise.file(workspace)
    node = BodyFile.read(path).function(exercise.name)
    instructions = {
        "write": shown(path) + (f", line {node.lineno}" if node else ""),
        "read": shown(catalogue.chapter_of(exercise.id).notebook),
        "check": f"course check {exercise.id}",
        "stuck": f"course hint {exercise.id}",
    }
    after = f"; after {', '.join(exercise.needs)}" if exercise.needs else ""
    return [
        Line(f"Next: {exercise.id}  {exercise.title}", "bold"),
        Line(f"  about {exercise.minutes} minutes, difficulty {exercise.difficulty} of 5{after}"),
        *(Line(f"  {label:<8} {text}", hang=9) for label, text in instructions.items()),
    ]


def tally(found: Sequence[ExerciseStatus]) -> str:
    yours = sum(status.passed for status in found)
    return f"{yours} of {len(found)} exercises are yours (a run counts the ones that it uses)."


def progress_bar(found: Sequence[ExerciseStatus], width: int = 30) -> str:
    done = sum(status.passed for status in found)
    filled = round(width * done / len(found))
    return f"[{'#' * filled}{'-' * (width - filled)}] {done} of {len(found)}"


def print_status(console: Console, found: Sequence[ExerciseStatus]) -> None:
    """The table of `course status`; a narrow terminal gets the exercise and its state only."""
    wide = console.width >= NARROW
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("exercise", no_wrap=True)
    table.add_column("state")
    if wide:
        table.add_column("hints", justify="right")
        table.add_column("minutes", justify="right")
        table.add_column("title")
    for status in found:
        exercise = status.exercise
        about = [str(status.hints or ""), str(exercise.minutes), exercise.title] if wide else []
        table.add_row(exercise.id, Text(status.state, STYLES[status.state]), *about)
    console.print(table)
    say(console)
    say(console, tally(found), "bold")


def build_lines(workspace: Path) -> list[Line]:
    """One line for each build: how many stages have passed, and whether the file has changed since."""
    record, lines = Progress(workspace).read(), []
    for build in builds().values():
        passed = [record.get(stage.id, {}).get("passed") for stage in build.stages]
        try:
            file = BodyFile.read(build.file(workspace))
            changed = {fingerprint(file)} != set(filter(None, passed)) and any(passed)
            state = "not attempted" if not build.attempted(file) else f"{sum(map(bool, passed))} of {len(passed)} stages passed"
            state += ", changed since" if changed and build.attempted(file) else ""
        except BrokenFile:
            state = "file cannot be read"
        lines.append(Line(f"{build.id}  {state}  ({build.title}, about {count(round(build.minutes / 60), 'hour')})", hang=2))
    return lines


def hunt_lines(workspace: Path) -> list[Line]:
    """One line for each chapter's hunts."""
    record, lines = Progress(workspace).read(), []
    for slug in sorted({hunt.slug for hunt in hunts().values()}):
        found = find_hunts(slug[:2])
        done = [hunt.letter for hunt in found if record.get(hunt.id, {}).get("passed")]
        lines.append(Line(f"{slug[:2]}.hunt   {len(done)} of {len(found)} repaired{': ' * bool(done)}{', '.join(done)}"))
    return lines


def next_build_lines(chapter: str, workspace: Path) -> list[Line]:
    """What to say about a chapter's build when its exercises have passed: nothing where it has none, or every stage has passed."""
    build = builds().get(f"{chapter}.build")
    stage = build and open_stage(build, Progress(workspace))
    if not stage:
        return []
    return [
        Line(f"Then: {build.id}  {build.title}", "bold"),
        Line(f"  stage {build.stages.index(stage) + 1} of {len(build.stages)}: {stage.title} (about {stage.minutes} minutes)"),
        Line(f"  write    {shown(build.file(workspace))}"),
        Line(f"  check    course check {stage.id}"),
    ]
