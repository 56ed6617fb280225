"""Chapter 06. Command line of the set-up check, `course doctor`: this machine, or several that are to train together.

`course` finds the command by this file's name (`shared.course.cli`). Torch is imported when it runs.
"""

import os
import sys
from pathlib import Path

import click

from shared.course import terminal
from shared.course.click_group import CourseCommand, examples
from shared.course.doctor import OK, Finding, examine, print_examination
from shared.course.errors import CourseError
from shared.course.paths import find_workspace
from shared.course.report import count


def corpus() -> Finding:
    from shared.corpus import embedded_corpus

    found = embedded_corpus()
    documents = [*found.training, *found.held_out]
    size = sum(len(document.content) for document in documents)
    return Finding(OK, "corpus", f"{count(len(documents), 'file')}, {size / 1e6:.1f} MB, checksums as recorded")


@click.command(
    cls=CourseCommand,
    epilog=examples(
        "course doctor",
        "course doctor --machines 2 --machine 0 --address 192.168.1.10",
        "course doctor --machines 2 --machine 1 --address 192.168.1.10 --folder /shared/runs",
    )
)
@click.option("--machines", type=click.IntRange(min=2), help="Check so many machines instead: the same command on each, within a minute.")
@click.option("--machine", type=click.IntRange(min=0), default=0, show_default=True, help="This machine's number, from 0.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Of machine 0, by which the others reach it.")
@click.option("--port", type=click.IntRange(1, 65535), default=29400, show_default=True, help="On machine 0, as torchrun's --master-port.")
@click.option("--folder", type=click.Path(path_type=Path), help="A folder that all machines should share.")
@click.option("--wait", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Seconds until all must have connected.")
def doctor(machines: int | None, machine: int, address: str, port: int, folder: Path | None, wait: float) -> None:
    """Diagnose the set-up: what is wrong, and what to do about it.

    With --machines it says whether several machines can train together: their addresses, whether they run the same code, how fast the links
    between them are, and whether they share a folder.
    """
    findings = examine(find_workspace(), corpus)
    if machines is not None:
        if machine >= machines:
            raise CourseError(f"--machine {machine}: {machines} machines have the numbers 0 to {machines - 1}.")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # or each try to connect prints a page; read when torch is loaded
        from shared.parallel.processes.machines import examine_machines

        findings = examine_machines(machine, machines, address, port, folder, wait)
    sys.exit(print_examination(terminal.open_console(), findings))


COMMANDS = (doctor,)
