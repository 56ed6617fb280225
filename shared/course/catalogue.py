"""Floor 0. The catalogue of chapters, exercises and contracts, found by reading files, never by importing the core.

A contract is a function in `shared/` under `@exercise("NN.name")`; what a reader needs around it (title, minutes,
hints) is in `chapters/NN_*/exercises.toml`. Reading costs milliseconds; importing the core would cost torch. Each is read when it is
asked for: every process that binds a function asks for its chapter's name, few ask for exercises, fewer for contracts.
"""

import ast
import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT, require_checkout


@dataclass(frozen=True)
class Contract:
    """A hole in the core: its module, and its function's text."""

    exercise: str  # "01.cross_entropy"
    module: str  # "shared.loss"
    path: Path
    node: ast.FunctionDef
    text: str  # from `def` to the end of the docstring

    @property
    def function(self) -> str:
        return self.node.name


@dataclass(frozen=True)
class Exercise:
    """What its chapter says about a contract."""

    id: str
    title: str
    minutes: int
    difficulty: int  # 1 (a line or two) to 5 (an evening)
    needs: tuple[str, ...]  # exercises and notions that come first
    hints: tuple[str, str, str]  # a question; the idea or formula; a skeleton
    after: str  # the question asked after a pass

    @property
    def contract(self) -> Contract:
        return contract_of(self.id)

    @property
    def name(self) -> str:
        return self.id.split(".", 1)[1]

    @property
    def chapter(self) -> str:
        return self.id.split(".", 1)[0]

    @property
    def stages(self) -> tuple["Exercise"]:
        """What is checked one by one, as of a build: an exercise is its own only stage."""
        return (self,)

    @property
    def solution_file(self) -> Path:
        return chapter_of(self.id).solution_file

    def file(self, workspace: Path) -> Path:
        """The learner's file, where this is one function of several."""
        return chapter_of(self.id).stub_file(workspace)


@dataclass(frozen=True)
class Chapter:
    number: str  # "01"
    slug: str  # "01_training_loop"

    @cached_property
    def exercises(self) -> tuple[Exercise, ...]:
        """In the order in which they are taught."""
        entries = tomllib.loads((CHECKOUT / "chapters" / self.slug / "exercises.toml").read_text(encoding="utf-8"))["exercise"]
        return tuple(Exercise(**entry | {"needs": tuple(entry["needs"]), "hints": tuple(entry["hints"])}) for entry in entries)

    def stub_file(self, workspace: Path) -> Path:
        return workspace / "chapters" / self.slug / "exercises.py"

    @property
    def solution_file(self) -> Path:
        return CHECKOUT / "solutions" / f"{self.slug}.py"

    @property
    def notebook(self) -> Path:
        return CHECKOUT / "notebooks" / f"{self.slug}.ipynb"


def exercise_id(node: ast.AST) -> str | None:
    """The id in a function's `@exercise("NN.name")`, if it has one."""
    for decorator in getattr(node, "decorator_list", ()):
        match decorator:
            case ast.Call(func=ast.Name(id="exercise"), args=[ast.Constant(value=str(found))]):
                return found
    return None


def contracts_in(path: Path, module: str) -> list[Contract]:
    source = path.read_text(encoding="utf-8")
    if "@exercise(" not in source:  # five files of six: to parse the others would take ten times as long as all the rest
        return []
    lines = source.splitlines()
    return [
        Contract(found, module, path, node, "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and (found := exercise_id(node))
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def core_files() -> list[Path]:
    """Every file of the core above floor 0."""
    files = sorted((CHECKOUT / "shared").rglob("*.py"))
    return [path for path in files if "course" not in path.relative_to(CHECKOUT).parts]


@cache
def contracts() -> dict[str, Contract]:
    found = [contract for path in core_files() for contract in contracts_in(path, module_name(path))]
    return {contract.exercise: contract for contract in found}


@cache
def contract_of(exercise_id: str) -> Contract:
    """One exercise's contract. Only the file that names the exercise is parsed."""
    files = (path for path in core_files() if f'@exercise("{exercise_id}")' in path.read_text(encoding="utf-8"))
    return next(one for path in files for one in contracts_in(path, module_name(path)) if one.exercise == exercise_id)


@cache
def chapters() -> dict[str, Chapter]:
    folders = sorted(require_checkout().glob("chapters/[0-9][0-9]_*"))
    return {folder.name[:2]: Chapter(folder.name[:2], folder.name) for folder in folders if (folder / "exercises.toml").exists()}


def all_exercises() -> dict[str, Exercise]:
    return {exercise.id: exercise for chapter in chapters().values() for exercise in chapter.exercises}


def chapter_of(exercise_id: str) -> Chapter:
    return chapters()[exercise_id.split(".", 1)[0]]


def find_exercise(name: str) -> Exercise:
    """The exercise called `name` ("01.cross_entropy"); an unknown name is refused with the nearest one."""
    chapter = chapters().get(name.split(".", 1)[0])
    for exercise in chapter.exercises if chapter else ():
        if exercise.id == name:
            return exercise
    known = all_exercises()
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    nearest = nearest or [full for full in known if full.split(".", 1)[1] == name]
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    if ".build" in name or ".hunt" in name:
        hint = " A build or a hunt is checked whole: `course check 07.build`, `course hunt 07`."
    raise CourseError(f"There is no exercise {name!r}.{hint} `course status` lists them all.")


def find_chapter(number: str) -> Chapter:
    """The chapter called "01", "1" or "01_training_loop"."""
    match = re.match(r"(\d{1,2})(_.*)?$", number)
    chapter = chapters().get(match[1].zfill(2)) if match else None
    if chapter is None or (match[2] and chapter.slug != number):
        raise CourseError(f"There is no chapter {number!r}. Chapters so far: {', '.join(chapters())}.")
    return chapter


def select(names: tuple[str, ...]) -> list[Exercise]:
    """The exercises that `names` means: ids, chapter numbers, or nothing for all, each once, in teaching order."""
    if not names:
        return list(all_exercises().values())
    wanted = {
        exercise.id: exercise
        for name in names
        for exercise in (find_chapter(name).exercises if re.match(r"\d+(_\w+)?$", name) else [find_exercise(name)])
    }
    numbers = sorted({exercise.chapter for exercise in wanted.values()})
    return [exercise for number in numbers for exercise in chapters()[number].exercises if exercise.id in wanted]
