"""Floor 0. `course watch`: check the open exercise whenever its file is saved, and move on when it passes.

One loop does everything. It waits for a typed line, a moment at most, and then looks whether the file is another one than
was checked: by its time, size and identity, so that no save is missed, whichever way an editor saves.
"""

import os
import select
import sys
from pathlib import Path

from rich.console import Console

from shared.course import check_command, hints, status
from shared.course.catalogue import Exercise
from shared.course.paths import shown
from shared.course.progress import Progress
from shared.course.report import PASS, outcome_lines
from shared.course.terminal import print_lines, say

WAKE = 0.15  # seconds between two looks at the file
KEYS = "h hint   n next   s status   q quit   (then Enter; an empty line checks again)"


class Watch:
    """One watch: the workspace, the exercise that is open, and where its output goes."""

    def __init__(self, console: Console, workspace: Path, exercise: Exercise):
        self.console, self.workspace, self.exercise = console, workspace, exercise
        self.checked: tuple | None = None  # the file's marks when it was checked last
        self.seen: tuple | None = None  # at the last look

    @property
    def file(self) -> Path:
        return self.exercise.file(self.workspace)

    def check(self) -> None:
        """Check the open exercise; after a pass open the next one. Ends where none is left (`exercise` is None)."""
        exercise = self.exercise
        self.checked = marks(self.file)  # before it is read: a save during the check is a new one
        [(_, outcome)] = check_command.run(self.console, [exercise], self.workspace)
        progress = Progress(self.workspace)
        kept = check_command.keep(outcome, progress)
        found = status.exercise_statuses(self.workspace)
        self.header(found)
        print_lines(self.console, outcome_lines(outcome))
        if outcome.state == PASS:
            self.exercise = check_command.show_pass(self.console, exercise, self.workspace)
            if self.exercise and self.exercise.chapter != exercise.chapter:
                self.checked = self.seen = marks(self.file)  # another file, which waits for its first save
        if not kept:
            say(self.console, hints.not_kept(progress), "yellow")
        self.footer()

    def look(self) -> None:
        """Check where the file is no longer what was checked, once two looks agree that it is completely written."""
        before, self.seen = self.seen, marks(self.file)
        if self.seen != self.checked and self.seen == before:
            self.check()

    def header(self, found: list[status.ExerciseStatus]) -> None:
        self.console.clear()  # without effect where there is no terminal
        say(self.console, status.progress_bar(found), "bold")
        say(self.console)

    def footer(self) -> None:
        say(self.console)
        if self.exercise is None:
            say(self.console, "Every exercise has passed: this part of the trainer is yours.", "bold green")
            return
        say(self.console, f"Watching {shown(self.file)} for {self.exercise.id}.")
        say(self.console, KEYS, "dim")

    def typed(self, line: str) -> bool:
        """Do what a typed line asks. False to leave."""
        found = status.exercise_statuses(self.workspace)
        match line.strip().lower():
            case "q" | "quit":
                return False
            case "h" | "hint":
                hints.print_hint(self.console, self.exercise, Progress(self.workspace))
                self.footer()
            case "n" | "next":
                self.exercise = status.next_open(found, after=self.exercise) or self.exercise
                self.check()
            case "s" | "status":
                status.print_status(self.console, found)
                self.footer()
            case "":
                self.check()
            case other:
                say(self.console, f"{other!r} is none of the keys.  {KEYS}")
        return True


def watch(console: Console, workspace: Path, exercise: Exercise | None) -> None:
    """Watch until everything has passed, `q` is typed, or Ctrl-C.

    Args:
        exercise: where to begin; None for the first that has not passed.
    """
    begin = exercise or status.next_open(status.exercise_statuses(workspace))
    if begin is None:
        say(console, "Every exercise has passed: there is nothing to watch. `course watch NN.name` watches one again.")
        return
    watching = Watch(console, workspace, begin)
    try:
        watching.check()
        loop(watching)
    except KeyboardInterrupt:
        say(console)
    say(console, status.tally(status.exercise_statuses(workspace)))


def loop(watching: Watch) -> None:
    """Look at what was typed and what was saved, until no exercise is left or someone leaves."""
    sources = [sys.stdin] if sys.stdin else []
    while watching.exercise is not None:
        readable, _, _ = select.select(sources, [], [], WAKE)
        if readable:
            typed = os.read(sys.stdin.fileno(), 4096).decode(errors="replace").splitlines()
            if not typed:  # the input has ended: from now on only saving counts
                sources.clear()
            for line in typed:
                if watching.exercise is None or not watching.typed(line):
                    return
        else:
            watching.look()


def marks(path: Path) -> tuple | None:
    """What changes when a file is saved; None where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
