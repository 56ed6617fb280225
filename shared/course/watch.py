"""Floor 0. `course watch`: check the open exercise whenever its file is saved, and move on when it passes.

One loop does everything: it wakes for a saved file or a typed line. A thread reads the lines, because a terminal's
input can only be waited for.
"""

import queue
import sys
import threading
from pathlib import Path

import watchfiles
from rich.console import Console

from shared.course import answers, opening, standing
from shared.course.catalogue import Exercise, chapter_of
from shared.course.outcome import PASS
from shared.course.paths import shown
from shared.course.progress import Progress
from shared.course.report import after_pass, outcome_lines
from shared.course.side_by_side import answer_text, print_comparison, solution_text
from shared.course.stubs import BodyFile
from shared.course.terminal import print_lines, say

WAKE = 150  # milliseconds between looks at what was typed
KEYS = "h hint   n next   s status   q quit   (then Enter; an empty line checks again)"


class Watch:
    """One session: the workspace, the exercise that is open, and where its output goes."""

    def __init__(self, console: Console, workspace: Path, exercise: Exercise):
        self.console, self.workspace, self.exercise = console, workspace, exercise

    @property
    def file(self) -> Path:
        return chapter_of(self.exercise.id).stub_file(self.workspace)

    def check(self) -> None:
        """Check the open exercise; after a pass open the next one. Ends where none is left (`exercise` is None)."""
        exercise = self.exercise
        [(_, outcome)] = answers.run(self.console, [exercise], self.workspace)
        progress = Progress(self.workspace)
        kept = answers.keep(outcome, progress)
        found = standing.standings(self.workspace)
        self.header(found)
        print_lines(self.console, outcome_lines(outcome))
        if outcome.state == PASS:
            self.passed(exercise, found)
        if not kept:
            say(self.console, opening.not_kept(progress), "yellow")
        self.footer()

    def passed(self, exercise: Exercise, found: list[standing.Standing]) -> None:
        file = BodyFile.read(self.file)
        print_comparison(self.console, answer_text(exercise, file), solution_text(exercise))
        self.exercise = standing.next_open(found, after=exercise)
        print_lines(self.console, after_pass(exercise, self.exercise))

    def header(self, found: list[standing.Standing]) -> None:
        self.console.clear()  # without effect where there is no terminal
        say(self.console, standing.progress_bar(found), "bold")
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
        found = standing.standings(self.workspace)
        match line.strip().lower():
            case "q" | "quit":
                return False
            case "h" | "hint":
                opening.print_hint(self.console, self.exercise, Progress(self.workspace))
                self.footer()
            case "n" | "next":
                self.exercise = standing.next_open(found, after=self.exercise) or self.exercise
                self.check()
            case "s" | "status":
                standing.print_status(self.console, found)
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
    begin = exercise or standing.next_open(standing.standings(workspace))
    if begin is None:
        say(console, "Every exercise has passed: there is nothing to watch. `course watch NN.name` watches one again.")
        return
    lines = typed_lines()
    session = Watch(console, workspace, begin)
    try:
        session.check()
        wake(session, lines)
    except KeyboardInterrupt:
        say(console)
    say(console, standing.tally(standing.standings(workspace)))


def wake(session: Watch, lines: queue.SimpleQueue) -> None:
    """The loop: look at what was saved and what was typed, until there is no exercise left or someone leaves."""
    folder = session.workspace / "chapters"
    saved = watchfiles.watch(folder, rust_timeout=WAKE, yield_on_timeout=True, debounce=100, step=20, raise_interrupt=True)
    for changes in saved:
        if session.exercise is None:
            return
        if str(session.file) in {path for _, path in changes}:
            session.check()
        while not lines.empty():
            if not session.typed(lines.get()):
                return


def typed_lines() -> queue.SimpleQueue:
    """Lines typed from now on. The end of the input, as under a pipe, ends nothing: only saving is left then."""
    lines: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines
