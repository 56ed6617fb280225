"""A learner for the tests: a folder of their own with fresh stubs, so that nobody's progress is read or touched."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from click.testing import CliRunner, Result

from shared.course import catalogue, stubs
from shared.course.assignments import find_build, fingerprint
from shared.course.cli import cli
from shared.course.progress import Progress

RIGHT = "solution"
COMMAND = [sys.executable, "-c", "from shared.course.cli import main; main()"]


def write_solutions(folder: Path) -> None:
    """A learner's files of all chapters, with every exercise solved."""
    for chapter in catalogue.chapters().values():
        target = chapter.stub_file(folder)
        target.parent.mkdir(parents=True)
        target.write_text(chapter.solution_file.read_text(encoding="utf-8"), encoding="utf-8")


def write_passed_build(folder: Path, number: str) -> None:
    """A learner's build of a chapter, which is the solution, with all its stages passed."""
    build, _ = find_build(f"{number}.build")
    build.file(folder).write_text(build.solution_file.read_text(encoding="utf-8"), encoding="utf-8")
    text = fingerprint(stubs.BodyFile.read(build.file(folder)))
    for stage in build.stages:
        Progress(folder).record_check(stage.id, text)


class Learner:
    """One folder with `chapters/`, what is written in it, and the command run there."""

    def __init__(self, folder: Path, chapter: str = "01"):
        self.folder, self.chapter = folder, catalogue.find_chapter(chapter)
        self.path = self.chapter.stub_file(folder)
        for other in catalogue.chapters().values():
            other.stub_file(folder).parent.mkdir(parents=True)
            other.stub_file(folder).write_text(stubs.stub_file(other), encoding="utf-8")
        self.progress = Progress(folder)

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def line(self, beginning: str) -> int:
        """The number of the first line that begins so."""
        return next(number for number, line in enumerate(self.text.split("\n"), start=1) if line.startswith(beginning))

    def function(self, name: str) -> str:
        return stubs.BodyFile.read(self.path).text(name)

    def write(self, name: str, body: str = RIGHT) -> None:
        """Write the body of a stub: statements, or the solution's own."""
        exercise = catalogue.find_exercise(f"{self.chapter.number}.{name}")
        if body == RIGHT:
            solution = stubs.BodyFile.read(self.chapter.solution_file)
            new = solution.text(name)
        else:
            last = stubs.stub_of(exercise.contract).rstrip("\n").split("\n")[-1]
            new = self.function(name).replace(last, textwrap.indent(textwrap.dedent(body).strip("\n"), "    "))
        old = self.function(name)
        assert old in self.text and new != old
        self.path.write_text(self.text.replace(old, new), encoding="utf-8")

    def course(self, *arguments: str, answer: str = "") -> Result:
        """The command in this process; its output is that of a pipe."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            return CliRunner().invoke(cli, arguments, input=answer, prog_name="course")
        finally:
            os.chdir(before)

    def start(self, *arguments: str, **settings) -> subprocess.Popen:
        """The command in a process of its own."""
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | settings
        return subprocess.Popen([*COMMAND, *arguments], cwd=self.folder, **settings)
