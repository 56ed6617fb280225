"""Floor 0. Commands for maintainers of the course: make the stubs, record a release, refresh notebooks, try the mutants."""

import sys
from collections.abc import Iterator

import click
from rich.table import Table

from shared.course import assignments, catalogue, mutants, released, reset, stubs, terminal
from shared.course.catalogue import Chapter
from shared.course.click_group import MAINTAINERS, CourseCommand, examples
from shared.course.errors import BrokenFile, CourseError
from shared.course.paths import CHECKOUT, shown
from shared.course.report import FAIL, PASS, Outcome, count


def chosen(number: str | None) -> list[Chapter]:
    return [catalogue.find_chapter(number)] if number else list(catalogue.chapters().values())


@click.command("stubs", cls=CourseCommand, section=MAINTAINERS, epilog=examples("course stubs", "course stubs 01", "course stubs --check"))
@click.argument("number", required=False, metavar="[NN]")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit code 1 if a file is not what the generator makes.")
@click.option("--force", is_flag=True, help="Replace functions that were edited too; the old file is kept in .course/saved/.")
def stubs_command(number: str | None, only_check: bool, force: bool) -> None:
    """Write the checkout's chapters/NN_*/exercises.py from the contracts.

    A chapter's build.py is written where it is missing, and compared by --check.
    """
    differing = [chapter for chapter in chosen(number) if stub_on_disk(chapter) != stubs.stub_file(chapter)]
    changed = [build for build in assignments.builds().values() if not build.is_released(CHECKOUT)]
    if only_check:
        for chapter in differing:
            click.echo(f"{shown(chapter.stub_file(CHECKOUT))} is not what the generator makes. `course stubs {chapter.number}` writes it.")
        for build in changed:
            click.echo(f"{shown(build.file(CHECKOUT))} is not {shown(build.folder / 'adapters.py')}. `course reset {build.id}` copies it.")
        sys.exit(1 if differing or changed else 0)
    for build in (build for build in changed if not build.file(CHECKOUT).exists()):
        click.echo(reset.reset(build, CHECKOUT))
    for chapter in differing:
        if edited := [] if force else edited_functions(chapter):
            raise CourseError(f"{shown(chapter.stub_file(CHECKOUT))} holds a learner's work: {', '.join(edited)}. `--force` replaces it.")
        click.echo(reset.reset_chapter(chapter, CHECKOUT))


def stub_on_disk(chapter: Chapter) -> str | None:
    path = chapter.stub_file(CHECKOUT)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def edited_functions(chapter: Chapter) -> list[str]:
    if stub_on_disk(chapter) is None:
        return []
    try:
        file = stubs.BodyFile.read(chapter.stub_file(CHECKOUT))
    except BrokenFile:
        return ["the file cannot be read"]
    return [exercise.id for exercise in chapter.exercises if file.attempted(exercise)]


@click.command("release", cls=CourseCommand, section=MAINTAINERS, epilog=examples("course release", "course release --check"))
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit code 1 if the record is not of this core.")
def release_command(only_check: bool) -> None:
    """Record the checksums of the core, the solutions, the checks and the mutants."""
    differing = released.edited()
    if only_check:
        for path in differing:
            click.echo(f"{path} is not as recorded. `course release` records it.")
        sys.exit(1 if differing or released.recorded() != released.current() else 0)
    released.write_manifest()
    click.echo(f"{shown(released.MANIFEST)} records {count(len(released.recorded()['files']), 'file')}; {len(differing)} had changed.")


@click.command("refresh", cls=CourseCommand, section=MAINTAINERS, epilog=examples("course refresh", "course refresh 01"))
@click.argument("number", required=False, metavar="[NN]")
def refresh_command(number: str | None) -> None:
    """Run a notebook afresh and store it, if other rounding and one thread print the same."""
    from shared.course import refresh  # it imports Jupyter's client, which the other commands need not wait for

    for chapter in chosen(number):
        refresh.refresh(chapter)
        click.echo(f"{shown(chapter.notebook)}: executed, compared with {' and '.join(refresh.VARIANTS)}, stored.")


@click.command("mutants", cls=CourseCommand, section=MAINTAINERS, epilog=examples("course mutants", "course mutants 01"))
@click.argument("number", required=False, metavar="[NN]")
def mutants_command(number: str | None) -> None:
    """Show that every mutant is rejected with its own sentence."""
    table = Table("exercise", "mutant", "rejected at", "verdict", box=None, padding=(0, 2, 0, 0), header_style="bold")
    verdicts = []
    for mutant, outcome in mutant_outcomes(chosen(number)):
        verdicts.append(verdict(mutant, outcome))
        table.add_row(mutant.exercise, mutant.name, f"{outcome.rung}: {outcome.title}" if outcome.rung else "", verdicts[-1])
    if not verdicts:
        raise CourseError("There are no mutants to try: tests/exercises/mutants/ holds none for what was asked.")
    terminal.open_console().print(table)
    rejected = verdicts.count(REJECTED)
    click.echo(f"\n{rejected} of {count(len(verdicts), 'mutant')} rejected with their own sentence.")
    sys.exit(0 if rejected == len(verdicts) else 1)


REJECTED = "own sentence"


def mutant_outcomes(chapters: list[Chapter]) -> Iterator[tuple[mutants.Mutant, Outcome]]:
    from shared.course import running

    for exercise in (exercise for chapter in chapters for exercise in chapter.exercises):
        for mutant in mutants.mutants_of(exercise.id):
            yield mutant, running.check_file(exercise, mutant.body_file())


def verdict(mutant: mutants.Mutant, outcome: Outcome) -> str:
    if outcome.state == PASS:
        return "ALIVE"
    if outcome.state == FAIL and outcome.misconception == mutant.sentence:
        return REJECTED
    return f"another's sentence: {outcome.misconception}" if outcome.misconception else "no sentence"


COMMANDS = (stubs_command, release_command, refresh_command, mutants_command)
