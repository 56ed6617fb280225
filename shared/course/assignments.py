"""Floor 0. The catalogue of assignments that are a whole file: builds, from adapters alone, and hunts, from a broken program.

A build's file, `chapters/NN_name/build.py`, holds adapters: functions by which the check reaches what the learner designs.
`tests/exercises/builds/NN_name/` holds what belongs to it:

    build.toml     title, forbidden modules, and for each stage its title, minutes and three hints
    adapters.py    the learner's file as it is released
    stages.py      STAGES: a stage's name -> its `Check`, whose cases observe the adapters
    wrong.toml     wrong builds, a table for each, [stage.name]: edits of `solutions/builds/NN_name.py`, and the sentence that it says

A hunt's right program is `solutions/hunts/NN_name/a.py`; `tests/exercises/hunts/NN_name.toml` has the edits that break it, what it prints
then and the choices, `NN_name.py` the checks of a repair. The learner's copy, `chapters/NN_name/hunts/a.py`, is made when it is asked for.

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
from typing import Any

from shared.course.catalogue import Exercise, find_exercise
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.stubs import BodyFile, bare_function

BUILDS = CHECKOUT / "tests" / "exercises" / "builds"
HUNTS = CHECKOUT / "tests" / "exercises" / "hunts"
NAME = re.compile(r"(\d{1,2})\.build(?:\.(\w+))?$")
HUNT_NAME = re.compile(r"(\d+)\.hunt\.(\w+)$")


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
class Assignment:
    """One file of the learner's, with the stages in which it is checked.

    path: of the learner's file, below `chapters/`.
    released: the file that the learner's is made from, by `edits` where it is a broken program.
    checks: the file of the stages' checks.
    after: what is asked or said after the last stage.
    forbidden: modules of the core, or of libraries, that are what is to be written.
    """

    id: str  # "07.build", "07.hunt.a"
    title: str
    path: str  # "07_tensor_parallel/build.py"
    released: Path
    solution_file: Path
    checks: Path
    after: str
    stages: tuple[Stage, ...] = field(repr=False)
    forbidden: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()

    @property
    def slug(self) -> str:
        return self.path.partition("/")[0]

    @property
    def minutes(self) -> int:
        return sum(stage.minutes for stage in self.stages)

    @property
    def folder(self) -> Path:
        return self.checks.parent

    @property
    def template(self) -> str:
        """The learner's file as it is released."""
        return with_edits(self.released.read_text(encoding="utf-8"), self.edits, self.id)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The functions that the learner's file must have: none in a program that is repaired."""
        nodes = [] if self.edits else ast.parse(self.template).body
        return tuple(node.name for node in nodes if isinstance(node, ast.FunctionDef))

    def file(self, workspace: Path) -> Path:
        return workspace / "chapters" / self.path

    def is_released(self, workspace: Path) -> bool:
        """Whether the learner's file is there, byte for byte as released."""
        return self.file(workspace).exists() and self.file(workspace).read_bytes() == self.template.encode()

    def attempted(self, file: BodyFile) -> bool:
        return fingerprint(file) != fingerprint(BodyFile.parsed(self.released, self.template))

    def wrong(self) -> dict[str, tuple[str, BodyFile]]:
        """Name -> the sentence of a wrong build, and the solution with its edits."""
        return {name: (entry.says, self.edited(entry)) for name, entry in self.wrong_builds().items()}

    def edited(self, wrong: WrongBuild) -> BodyFile:
        """The solution with the edits of a wrong build, under a path of its own."""
        source = with_edits(self.solution_file.read_text(encoding="utf-8"), wrong.edits, f"{self.id}, {wrong.name}")
        return BodyFile.parsed(Path(f"{self.solution_file}#{wrong.name}"), source)

    def wrong_builds(self) -> dict[str, WrongBuild]:
        """The entries of `wrong.toml`, by their names; a hunt has none."""
        return {} if self.edits else read_wrong_builds((self.folder / "wrong.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Hunt(Assignment):
    """A broken program, of one stage. `after` is said with the right answer."""

    letter: str = ""
    symptom: str = ""  # what the broken program prints
    answer: int = 0  # which of the choices it is, from 1
    choices: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return f"course hunt {self.slug[:2]} {self.letter}"


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
def builds() -> dict[str, Assignment]:
    """Each chapter's build, by its id."""
    found = [read_build(path.parent) for path in sorted(BUILDS.glob("[0-9][0-9]_*/build.toml"))]
    return {build.id: build for build in found}


def read_build(folder: Path) -> Assignment:
    entries, slug = tomllib.loads((folder / "build.toml").read_text(encoding="utf-8")), folder.name
    name = f"{slug[:2]}.build"
    return Assignment(
        name,
        entries["title"],
        f"{slug}/build.py",
        released=folder / "adapters.py",
        solution_file=CHECKOUT / "solutions" / "builds" / f"{slug}.py",
        checks=folder / "stages.py",
        after=entries["after"],
        stages=tuple(Stage(f"{name}.{e['name']}", e["title"], e["minutes"], tuple(e["hints"])) for e in entries["stage"]),
        forbidden=tuple(entries["forbidden"]),
    )


@cache
def hunts() -> dict[str, Hunt]:
    """Every hunt, by its id."""
    found = []
    for path in sorted(HUNTS.glob("*.toml")):
        entries, slug = tomllib.loads(path.read_text(encoding="utf-8")), path.stem
        found += [read_hunt(slug, entry, tuple(entries["choices"])) for entry in entries["hunt"]]
    return {hunt.id: hunt for hunt in found}


def read_hunt(slug: str, entry: dict[str, Any], choices: tuple[str, ...]) -> Hunt:
    name, letter = f"{slug[:2]}.hunt.{entry['letter']}", entry["letter"]
    right = CHECKOUT / "solutions" / "hunts" / slug / f"{letter}.py"
    return Hunt(
        name,
        path=f"{slug}/hunts/{letter}.py",
        released=right,
        solution_file=right,
        checks=HUNTS / f"{slug}.py",
        stages=(Stage(name, entry["title"], 15, ("", "", "")),),
        choices=choices,
        **entry | {"edits": tuple(map(tuple, entry["edits"]))},
    )


def find_hunts(number: str, letter: str | None = None) -> list[Hunt]:
    """A chapter's hunts, or the one with that letter.

    Raises:
        CourseError: there is none; the message lists what there is.
    """
    of_chapter = [hunt for hunt in hunts().values() if hunt.slug[:2] == number.zfill(2)]
    found = [hunt for hunt in of_chapter if letter in (None, hunt.letter)]
    if not found:
        there = [hunt.letter for hunt in of_chapter] or sorted({f"course hunt {hunt.slug[:2]}" for hunt in hunts().values()})
        raise CourseError(f"Chapter {number} has no hunt{f' {letter!r}' if of_chapter else 's'}. There are: {', '.join(there)}.")
    return found


def is_build(name: str) -> bool:
    """Whether a name on the command line means a build or a stage: 07.build, 7.build.attention."""
    return NAME.match(name) is not None


def find_build(name: str) -> tuple[Assignment, Stage | None]:
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


def find(name: str, hunts: bool = False) -> tuple[Exercise | Assignment, Exercise | Stage | None]:
    """What `name` means on the command line, and the stage, where it names one: an exercise is its own only stage.

    Args:
        hunts: whether a hunt may be meant, which has neither hints nor a solution to show.

    Raises:
        CourseError: there is none of that name.
    """
    if is_build(name):
        return find_build(name)
    if hunts and (hunt := HUNT_NAME.match(name)):
        return find_hunts(*hunt.groups())[0], None
    exercise = find_exercise(name)
    return exercise, exercise


def fingerprint(file: BodyFile) -> str:
    """Identifies the text of a build. Comments, layout and the functions' docstrings do not count."""
    nodes = file.tree.body[1:] if ast.get_docstring(file.tree) is not None else file.tree.body
    bare = [f"{node.name}{bare_function(node)}" if isinstance(node, ast.FunctionDef) else ast.dump(node) for node in nodes]
    return hashlib.sha256("\n".join(bare).encode()).hexdigest()
