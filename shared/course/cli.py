"""Floor 0. The `course` command line: arguments, options and exit codes. What a command does is in the module that it calls.

Exit codes: 0 all is well (every check passed), 1 something failed, 2 nothing failed but something is not attempted yet,
64 the command could not be carried out as it was given, 130 interrupted. Nothing here imports torch: a command answers
at once, and only a check pays for loading it.
"""

import importlib
import sys
from collections.abc import Iterator

import click

from shared.course import catalogue, hints, hunts, maintainer_commands, reading, reset, rings, status, terminal
from shared.course.assignments import find, find_hunts
from shared.course.click_group import CourseGroup, examples
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT, find_workspace, shown
from shared.course.progress import Progress
from shared.course.stubs import BodyFile


@click.group(cls=CourseGroup, invoke_without_command=True, epilog=examples("course", "course watch", "course check 01"))
@click.pass_context
def cli(context: click.Context) -> None:
    """Learn to build a language-model trainer, one exercise at a time."""
    if context.invoked_subcommand is None:
        orientation()


def orientation() -> None:
    """What someone sees who types `course` and nothing else."""
    console = terminal.open_console()
    found = status.exercise_statuses(find_workspace())
    terminal.say(console, status.tally(found), "bold")
    terminal.say(console)
    print_next(found)
    terminal.say(console)
    keys = "`course watch` checks whenever you save. `course status` shows where you stand. `course --help` lists all commands."
    terminal.say(console, keys)


def print_next(found: list[status.ExerciseStatus]) -> None:
    console = terminal.open_console()
    exercise = status.next_open(found)
    done = {one.exercise.chapter for one in found} - {one.exercise.chapter for one in found if not one.passed}
    for lines in (status.next_build_lines(chapter, find_workspace()) for chapter in sorted(done)):
        terminal.print_lines(console, lines)
    if exercise is None:
        terminal.say(console, f"Every exercise has passed. {status.tally(found)}", "bold green")
    else:
        terminal.print_lines(console, status.next_lines(exercise, find_workspace()))


@cli.command("next", epilog=examples("course next"))
def next_command() -> None:
    """Say which exercise comes next and where to write it."""
    print_next(status.exercise_statuses(find_workspace()))


@cli.command(epilog=examples("course check", "course check 01", "course check 01.evaluate 01.train_step", "course check 07.build"))
@click.argument("names", nargs=-1, metavar="[NN[.name]]...")
@click.option("--impl", "implementation", type=click.Choice(["mine", "reference"]), default="mine", help="Your file, or the solutions.")
@click.option("--compare", is_flag=True, help="Show your answers next to the solutions also where several are checked.")
def check(names: tuple[str, ...], implementation: str, compare: bool) -> None:
    """Check your answers: all, a chapter's, or the ones named.

    07.build is chapter 07's build, which is checked where it is named, and 07.build.attention one stage of it.

    Exit code 0: every check passed. 1: at least one failed. 2: none failed, at least one is not attempted.
    """
    from shared.course import check_command

    sys.exit(check_command.check(terminal.open_console(), names, implementation, compare))


@cli.command(epilog=examples("course hunt 07", "course hunt 07 a", "course hunt 07 a --check", "course hunt 07 a --check --because 3"))
@click.argument("chapter", metavar="NN")
@click.argument("letter", required=False, metavar="[LETTER]")
@click.option("--check", "only_check", is_flag=True, help="Run your repaired copy, and ask what the mistake was.")
@click.option("--because", type=click.IntRange(1), help="What the mistake was, by its number in the list.")
def hunt(chapter: str, letter: str | None, only_check: bool, because: int | None) -> None:
    """List a chapter's broken programs, copy one, or check its repair.

    Exit code of --check 0: repaired and explained. 1: not. 2: nothing is changed yet, or the explanation is missing.
    """
    console = terminal.open_console()
    if letter is None:
        hunts.print_list(console, chapter)
    elif only_check:
        sys.exit(hunts.check(console, find_hunts(chapter, letter)[0], because))
    else:
        hunts.start(console, find_hunts(chapter, letter)[0])


@cli.command(epilog=examples("course watch", "course watch 01.evaluate"))
@click.argument("name", required=False, metavar="[NN.name]")
def watch(name: str | None) -> None:
    """Check the next exercise whenever you save; move on when it passes."""
    from shared.course import watch as watching

    watching.watch(terminal.open_console(), find_workspace(), catalogue.find_exercise(name) if name else None)


@cli.command(epilog=examples("course hint 01.cross_entropy", "course hint 01.cross_entropy --rung 1"))
@click.argument("name", metavar="NN.name")
@click.option("--rung", type=click.IntRange(1, 3), help="Read an opened hint again.")
def hint(name: str, rung: int | None) -> None:
    """Open the next of three hints: a question, the idea, a skeleton.

    A build has three hints for each stage: 07.build opens the next hint of the first stage that has not passed.
    """
    (assignment, stage), progress = find(name), Progress(find_workspace())
    stage = stage or hints.open_stage(assignment, progress) or assignment.stages[-1]
    hints.print_hint(terminal.open_console(), stage, progress, rung)


@cli.command(epilog=examples("course solution 01.cross_entropy"))
@click.argument("name", metavar="NN.name")
def solution(name: str) -> None:
    """Show the solution, after a pass or after the third hint.

    That of a build opens after all stages have passed, or after the third hint of one.
    """
    sys.exit(0 if hints.print_solution(terminal.open_console(), *find(name), Progress(find_workspace())) else 1)


@cli.command("reset", epilog=examples("course reset 01.cross_entropy", "course reset 01", "course reset 01 --yes"))
@click.argument("name", metavar="NN[.name]")
@click.option("--yes", is_flag=True, help="Reset a whole chapter without asking.")
def reset_command(name: str, yes: bool) -> None:
    """Put a stub back, and keep your text in .course/saved/.

    07.build puts a build's file back, 07.hunt.a a broken program.
    """
    console, workspace = terminal.open_console(), find_workspace()
    if "." in name:
        terminal.say(console, reset.reset(find(name, hunts=True)[0], workspace))
        return
    chapter = catalogue.find_chapter(name)
    path = chapter.stub_file(workspace)
    if path.exists() and not yes and not click.confirm(f"Put all stubs of chapter {chapter.number} back in {shown(path)}?"):
        terminal.say(console, "Nothing was reset.")
        sys.exit(1)
    terminal.say(console, reset.reset_chapter(chapter, workspace))


@cli.command("status", epilog=examples("course status"))
def status_command() -> None:
    """Show every exercise: passed, changed since, attempted or not, with hints and minutes."""
    console = terminal.open_console()
    status.print_status(console, status.exercise_statuses(find_workspace()))
    terminal.print_lines(console, [*status.build_lines(find_workspace()), *status.hunt_lines(find_workspace())])


@cli.command("map", epilog=examples("course map", "course map 01", "course map --spine", "course map --rings"))
@click.argument("chapter", required=False, metavar="[NN]")
@click.option("--spine", "show_spine", is_flag=True, help="List the modules that train a model, in reading order, with lines and minutes.")
@click.option("--rings", "show_rings", is_flag=True, help="Count modules and lines of the spine, of the core, and of what is around it.")
def map_command(chapter: str | None, show_spine: bool, show_rings: bool) -> None:
    """Count the core by chapter or by ring, or list what a chapter added, or the spine."""
    if (chapter is not None) + show_spine + show_rings > 1:
        raise CourseError("Give one of the three: a chapter, as in `course map 01`, or --spine, or --rings.")
    if show_spine or show_rings:
        lines = rings.spine_lines() if show_spine else rings.ring_lines()
    else:
        lines = reading.size_lines() if chapter is None else reading.map_lines(catalogue.find_chapter(chapter))
    terminal.print_lines(terminal.open_console(), lines)


@cli.command(epilog=examples("course read shared.loss", "course read loop --reveal", "course read shared/loop.py --impl mine"))
@click.argument("module", metavar="MODULE")
@click.option("--impl", "implementation", type=click.Choice(["reference", "mine"]), default="reference", help="Whose bodies to show.")
@click.option("--reveal", is_flag=True, help="Show also the bodies of exercises that you have not done.")
def read(module: str, implementation: str, reveal: bool) -> None:
    """Print a module of the core with the exercises' bodies in their place."""
    path, workspace = reading.find_module(module), find_workspace()
    progress = Progress(workspace)

    def body_file(contract: catalogue.Contract) -> BodyFile | None:
        chapter = catalogue.chapter_of(contract.exercise)
        if implementation == "mine":
            return BodyFile.read(chapter.stub_file(workspace))
        return BodyFile.read(chapter.solution_file) if reveal or progress.opened(contract.exercise) else None

    terminal.print_python(terminal.open_console(), reading.with_bodies(path, body_file))


def registered() -> Iterator[click.Command]:
    """Commands that packages of the core bring: `COMMANDS` in each `shared/*/commands.py`, none of which imports torch."""
    for path in sorted(CHECKOUT.glob("shared/*/commands.py")):
        yield from importlib.import_module(catalogue.module_name(path)).COMMANDS


for command in (*registered(), *maintainer_commands.COMMANDS):
    cli.add_command(command)


def main() -> None:
    """The entry point of the installed command."""
    cli(prog_name="course")


if __name__ == "__main__":
    main()
