"""Floor 0. The `course` command on builds: check stage by stage, hints, solution, reset, and a line for `course status`."""

from pathlib import Path

from rich.console import Console

from shared.course import hints, reset
from shared.course.builds import Build, Stage, builds, find_build, fingerprint
from shared.course.errors import BrokenFile
from shared.course.outcome import FAIL, NOT_ATTEMPTED, PASS, Outcome
from shared.course.paths import find_workspace, shown
from shared.course.progress import ALL_HINTS, Progress
from shared.course.report import Line, count, outcome_lines
from shared.course.stubs import BodyFile
from shared.course.terminal import print_lines, print_python, say


def check(console: Console, name: str, reference: bool) -> int:
    """Check a build, or one stage, and print each stage's outcome. Returns the exit code."""
    from shared.course import build_check  # these start processes, which the other commands do not
    from shared.course.check_command import exit_code, keep

    build, stage = find_build(name)
    progress = Progress(find_workspace())
    say(console, f"{build.id}  {build.title}", "bold")
    try:
        file = read(build, None if reference else find_workspace())
    except BrokenFile as error:
        say(console, str(error), "red")
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
        if not reference and not keep(outcome, progress):
            say(console, hints.not_kept(progress), "yellow")
    if stage is None:
        passed = sum(outcome.state == PASS for outcome in outcomes)
        say(console, f"{passed} of {count(len(outcomes), 'stage')} passed.", "bold")
        if passed == len(outcomes):
            say(console, f"\nTo think about: {build.after}\n\n`course solution {build.id}` shows another way to write it.")
    return exit_code(outcomes)


def read(build: Build, workspace: Path | None) -> BodyFile:
    """The learner's file, or the solution.

    Raises:
        BrokenFile: it is missing or Python cannot read it.
    """
    path = build.file(workspace) if workspace else build.solution_file
    if not path.exists():
        raise BrokenFile(f"{shown(path)} is missing. `course reset {build.id}` makes a new one.")
    return BodyFile.read(path)


def open_stage(build: Build, progress: Progress) -> Stage | None:
    """The first stage that has not passed."""
    return next((stage for stage in build.stages if not progress.passed(stage.id)), None)


def print_hint(console: Console, name: str, rung: int | None) -> None:
    """The next hint of a stage; of the first that has not passed, where `name` is a whole build."""
    build, stage = find_build(name)
    progress = Progress(find_workspace())
    hints.print_hint(console, stage or open_stage(build, progress) or build.stages[-1], progress, rung)


def print_solution(console: Console, name: str) -> bool:
    """The whole solution, after all stages have passed or after the third hint of the stage. Returns whether it was shown."""
    build, stage = find_build(name)
    progress = Progress(find_workspace())
    stage = stage or open_stage(build, progress)
    solved = all(progress.read().get(each.id, {}).get("solved") for each in build.stages)
    if not solved and stage is not None and progress.hints(stage.id) < ALL_HINTS:
        left = count(ALL_HINTS - progress.hints(stage.id), "hint")
        opens = f"The solution of {build.id} opens after all its stages have passed, or after the third hint of one"
        say(console, f"{opens}: {stage.id} has {left} to go.")
        return False
    say(console, f"{build.id}  the course's solution\n", "bold")
    print_python(console, build.solution_file.read_text(encoding="utf-8").rstrip())
    return True


def reset_build(build: Build, workspace: Path) -> str:
    """Put the released file back, and keep the learner's. Returns what was done."""
    path = build.file(workspace)
    if build.is_released(workspace):
        return f"{shown(path)} is untouched: there is nothing to reset."
    saved = reset.save(workspace, build.id, path.read_bytes()) if path.exists() else None
    reset.write(path, build.template)
    return f"{shown(path)} holds {build.id} as released." + (f" Your text is kept in {shown(saved)}." if saved else "")


def status_lines(workspace: Path) -> list[Line]:
    """One line for each build: how many stages have passed, and whether the file has changed since."""
    record, lines = Progress(workspace).read(), []
    for build in builds().values():
        passed = [record.get(stage.id, {}).get("passed") for stage in build.stages]
        try:
            file = read(build, workspace)
            changed = {fingerprint(file)} != set(filter(None, passed)) and any(passed)
            state = "not attempted" if not build.attempted(file) else f"{sum(map(bool, passed))} of {len(passed)} stages passed"
            state += ", changed since" if changed and build.attempted(file) else ""
        except BrokenFile:
            state = "file cannot be read"
        lines.append(Line(f"{build.id}  {state}  ({build.title}, about {count(round(build.minutes / 60), 'hour')})", hang=2))
    return lines


def next_lines(chapter: str, workspace: Path) -> list[Line]:
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
