"""Floor 0. The catalogue of builds: what a learner writes from an empty file, in the stages in which it is checked.

A build's file, `chapters/NN_name/build.py`, holds adapters alone: functions by which the check reaches what the learner designs.
`tests/exercises/builds/NN_name/` holds what belongs to it:

    build.toml     title, forbidden modules, and for each stage its title, minutes and three hints
    adapters.py    the learner's file as it is released
    stages.py      STAGES: a stage's name -> its `Check`, whose cases observe the adapters
    wrong.toml     wrong builds, a table for each, [stage.name]: edits of `solutions/builds/NN_name.py`, and the sentence that it says

Reading the catalogue costs milliseconds and imports nothing of this.
"""

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.stubs import BodyFile, bare_function

FOLDER = CHECKOUT / "tests" / "exercises" / "builds"
NAME = re.compile(r"(\d{1,2})\.build(?:\.(\w+))?$")


@dataclass(frozen=True)
class Stage:
    """One stage of a build: `id` is 07.build.attention."""

    id: str
    title: str
    minutes: int
    hints: tuple[str, str, str]  # a question; the idea or formula; a skeleton

    @property
    def name(self) -> str:
        return self.id.rsplit(".", 1)[1]


@dataclass(frozen=True)
class WrongBuild:
    """A wrong build, as edits of the solution: each a text that stands there once, and what is written instead.

    stage: where the check must stop it.
    slow: whether it is tried at its stage in the slow suite only.
    """

    stage: str
    name: str
    says: str
    edits: list[tuple[str, str]]
    slow: bool = False


@dataclass(frozen=True)
class Build:
    """One chapter's build.

    forbidden: modules of the core, or of libraries, that are the build itself.
    adapters: the functions that the learner's file must have.
    """

    slug: str  # "07_tensor_parallel"
    title: str
    forbidden: tuple[str, ...]
    after: str  # the question asked after the last stage
    stages: tuple[Stage, ...] = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.slug[:2]}.build"

    @property
    def minutes(self) -> int:
        return sum(stage.minutes for stage in self.stages)

    @property
    def folder(self) -> Path:
        return FOLDER / self.slug

    @property
    def template(self) -> str:
        """The learner's file as it is released."""
        return (self.folder / "adapters.py").read_text(encoding="utf-8")

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(node.name for node in ast.parse(self.template).body if isinstance(node, ast.FunctionDef))

    @property
    def solution_file(self) -> Path:
        return CHECKOUT / "solutions" / "builds" / f"{self.slug}.py"

    @property
    def checks(self) -> Path:
        return self.folder / "stages.py"

    def file(self, workspace: Path) -> Path:
        return workspace / "chapters" / self.slug / "build.py"

    def is_released(self, workspace: Path) -> bool:
        """Whether the learner's file is there, byte for byte as released."""
        return self.file(workspace).exists() and self.file(workspace).read_bytes() == self.template.encode()

    def attempted(self, file: BodyFile) -> bool:
        return fingerprint(file) != fingerprint(BodyFile.parsed(self.folder / "adapters.py", self.template))

    def wrong(self) -> dict[str, tuple[str, BodyFile]]:
        """Name -> the sentence of a wrong build, and the solution with its edits."""
        return {name: (entry.says, self.edited(entry)) for name, entry in self.wrong_builds().items()}

    def edited(self, wrong: WrongBuild) -> BodyFile:
        """The solution with the edits of a wrong build, under a path of its own."""
        source = with_edits(self.solution_file.read_text(encoding="utf-8"), wrong.edits, f"{self.id}, {wrong.name}")
        return BodyFile.parsed(Path(f"{self.solution_file}#{wrong.name}"), source)

    def wrong_builds(self) -> dict[str, WrongBuild]:
        """The entries of `wrong.toml`, by their names."""
        return read_wrong_builds((self.folder / "wrong.toml").read_text(encoding="utf-8"))


def read_wrong_builds(text: str) -> dict[str, WrongBuild]:
    """The wrong builds of a file's text, by their names. A name that one stage has twice is an error of TOML's.

    Raises:
        CourseError: two stages have the same name.
    """
    found: dict[str, WrongBuild] = {}
    for stage, named in tomllib.loads(text).items():
        if twice := found.keys() & named.keys():
            raise CourseError(f"wrong.toml: {min(twice)} is a wrong build of two stages. Rename one: tests know it by its name.")
        found |= {name: WrongBuild(stage, name, **entry) for name, entry in named.items()}
    return found


def with_edits(source: str, edits: Iterable[tuple[str, str]], name: str) -> str:
    """A solution with texts replaced, as wrong builds and broken programs are made.

    Raises:
        CourseError: a text to replace is not in the solution exactly once.
    """
    for find, replacement in edits:
        if source.count(find) != 1:
            raise CourseError(f"{name}: {find!r} is {source.count(find)} times in the solution, not once.")
        source = source.replace(find, replacement)
    return source


@cache
def builds() -> dict[str, Build]:
    """Each chapter's build, by its id."""
    found = [read_build(path) for path in sorted(FOLDER.glob("[0-9][0-9]_*/build.toml"))]
    return {build.id: build for build in found}


def read_build(path: Path) -> Build:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    number = path.parent.name[:2]
    stages = tuple(Stage(f"{number}.build.{e['name']}", e["title"], e["minutes"], tuple(e["hints"])) for e in entries["stage"])
    return Build(path.parent.name, entries["title"], tuple(entries["forbidden"]), entries["after"], stages)


def is_build(name: str) -> bool:
    """Whether a name on the command line means a build or a stage: 07.build, 7.build.attention."""
    return NAME.match(name) is not None


def find_build(name: str) -> tuple[Build, Stage | None]:
    """The build that `name` means, and the stage, where it names one.

    Raises:
        CourseError: there is none; the message lists what there is.
    """
    number, stage_name = NAME.match(name).groups()
    build = builds().get(f"{number.zfill(2)}.build")
    if build is None:
        raise CourseError(f"Chapter {number.zfill(2)} has no build. There are: {', '.join(builds()) or 'none'}.")
    stage = next((stage for stage in build.stages if stage.name == stage_name), None)
    if stage_name and stage is None:
        raise CourseError(f"{build.id} has no stage {stage_name!r}. Its stages: {', '.join(stage.name for stage in build.stages)}.")
    return build, stage


def fingerprint(file: BodyFile) -> str:
    """Identifies the text of a build. Comments, layout and the functions' docstrings do not count."""
    nodes = file.tree.body[1:] if ast.get_docstring(file.tree) is not None else file.tree.body
    bare = [f"{node.name}{bare_function(node)}" if isinstance(node, ast.FunctionDef) else ast.dump(node) for node in nodes]
    return hashlib.sha256("\n".join(bare).encode()).hexdigest()
