"""Floor 0. The click group of the command line: help in three sections, the nearest name for an unknown one, errors as sentences."""

import difflib
import sys
from typing import Any

import click

from shared.course.errors import CourseError

CANNOT = 64  # the command cannot be carried out as given; 2, click's own code, means NOT ATTEMPTED here
INTERRUPTED = 130
SYNONYMS = {  # what other programs call a command: it is taken
    "compare": "report", "diff": "report", "evaluate": "eval", "generate": "sample", "list": "runs", "ls": "runs",
}
TRAINER = "trainer"  # sections of commands: `command.section`
MAINTAINERS = "maintainers"


class CourseCommand(click.Command):
    """A command with its section of the help."""

    def __init__(self, *args: Any, section: str = "learners", **settings: Any):
        super().__init__(*args, **settings)
        self.section = section


class CourseGroup(click.Group):
    """The group of all commands, in the order in which they were added."""

    command_class = CourseCommand

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        headings = {"learners": "Commands", TRAINER: "Commands of the trainer", MAINTAINERS: "Commands for maintainers of the course"}
        for section, heading in headings.items():
            rows = [(name, command.get_short_help_str(100)) for name, command in self.commands.items() if command.section == section]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(self, context: click.Context, arguments: list[str]) -> tuple:
        name, *rest = arguments
        if name not in self.commands and SYNONYMS.get(name) in self.commands:
            return super().resolve_command(context, [SYNONYMS[name], *rest])
        if name not in self.commands and not name.startswith("-"):
            raise click.UsageError(f"There is no command {name!r}. {self.offer(name)}", context)
        return super().resolve_command(context, arguments)

    def offer(self, name: str) -> str:
        if name[:1].isdigit():
            return f"Did you mean `course check {name}`?"
        nearest = difflib.get_close_matches(name, self.commands, n=1, cutoff=0.5)
        return f"Did you mean `course {nearest[0]}`?" if nearest else "`course --help` lists them."

    def main(self, *args: Any, **settings: Any) -> None:
        """Run, and end the process with the exit codes that the command line's module lists."""
        try:
            ended = super().main(*args, **settings | {"standalone_mode": False})
        except click.ClickException as error:
            error.show()
            sys.exit(CANNOT)
        except CourseError as error:
            click.echo(str(error), err=True)
            sys.exit(CANNOT)
        except click.Abort:
            click.echo("Stopped.", err=True)
            sys.exit(INTERRUPTED)
        sys.exit(ended if isinstance(ended, int) else 0)


def examples(*lines: str) -> str:
    """An epilog that click leaves as it is."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
