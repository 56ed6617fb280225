"""Floor 0. `course map` and `course read`: what a chapter added to the core, and a module with the exercises' bodies in their place."""

import ast
import difflib
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.course import catalogue
from shared.course.catalogue import Chapter, Contract
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.report import Line
from shared.course.stubs import BodyFile

CHAPTER_LINE = re.compile(r"Chapter (\d\d)\.\s+")


@dataclass(frozen=True)
class Part:
    """A public function or class of a module, in one sentence."""

    name: str
    sentence: str
    exercise: str | None


@dataclass(frozen=True)
class Room:
    """A module of the core, in one sentence, with its parts."""

    module: str
    sentence: str
    parts: tuple[Part, ...]


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def rooms(chapter: str) -> list[Room]:
    """What the core gained with a chapter: the modules whose docstring opens with it."""
    found = []
    for path in catalogue.core_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree) or ""
        opening = CHAPTER_LINE.match(docstring)
        if opening and opening[1] == chapter:
            found.append(Room(catalogue.module_name(path), first_sentence(docstring[opening.end() :]), parts(tree)))
    return found


def parts(tree: ast.Module) -> tuple[Part, ...]:
    public = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")]
    described = [node for node in public if ast.get_docstring(node)]  # what has no docstring is a detail of its module
    return tuple(Part(node.name, first_sentence(ast.get_docstring(node)), catalogue.exercise_id(node)) for node in described)


def map_lines(chapter: Chapter) -> list[Line]:
    """The text of `course map NN`."""
    lines = [Line(f"Chapter {chapter.number}: what the core gained (* marks an exercise)", "bold")]
    for room in rooms(chapter.number):
        lines += [Line(), Line(room.module, "bold cyan"), Line(f"  {room.sentence}")]
        for part in room.parts:
            lines.append(Line(f"  {'*' if part.exercise else ' '} {part.name}: {part.sentence}", "green" if part.exercise else "", hang=4))
    return lines


def code_lines(source: str) -> int:
    """Lines of a module without blank ones, comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented) and ast.get_docstring(node) is not None]
    docstrings = {line for node in nodes for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    text = [line.strip() for line in source.splitlines()]
    return sum(bool(line) and line[0] != "#" and number not in docstrings for number, line in enumerate(text, start=1))


def size_of(path: Path) -> Counter:
    """A module's lines, and its lines of code."""
    source = path.read_text(encoding="utf-8")
    return Counter(modules=1, lines=len(source.splitlines()), code=code_lines(source))


def size_lines() -> list[Line]:
    """The text of `course map`: how large the core is, capability by capability."""
    sizes = {number: Counter() for number in catalogue.chapters()}
    for path in catalogue.core_files():
        opening = CHAPTER_LINE.match(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        if opening:
            sizes[opening[1]] += size_of(path)
    whole = sum(sizes.values(), Counter())
    rows = [(catalogue.chapters()[number].slug, each) for number, each in sizes.items()] + [("all", whole)]
    lines = [Line("The core, chapter by chapter", "bold"), Line(), Line(f"{'chapter':<24}{'modules':>8}{'lines':>8}{'of code':>9}", "bold")]
    lines += [Line(f"{name:<24}{each['modules']:>8,}{each['lines']:>8,}{each['code']:>9,}", hang=24) for name, each in rows]
    said = "Lines of code are those that are not blank, comments or docstrings. `course map 06` lists a chapter's modules."
    return [*lines, Line(), Line(said)]


def find_module(name: str) -> Path:
    """The file that `name` means: "shared.loop", "loop" or "shared/loop.py".

    Raises:
        CourseError: there is none; the nearest one is offered.
    """
    files = {catalogue.module_name(path): path for path in sorted((CHECKOUT / "shared").rglob("*.py"))}
    dotted = name.removesuffix(".py").replace("/", ".").strip(".")
    for module, path in files.items():
        if module in (dotted, f"shared.{dotted}") or dotted.endswith(f".{module}"):  # the last for an absolute path
            return path
    nearest = difflib.get_close_matches(f"shared.{dotted.removeprefix('shared.')}", files, n=1, cutoff=0.4)
    offered = f"Did you mean {nearest[0]}?" if nearest else "`course map 01` lists those of chapter 01."
    raise CourseError(f"There is no module {name!r} in the core. {offered}")


def with_bodies(path: Path, body_file: Callable[[Contract], BodyFile | None]) -> str:
    """A module's source with each exercise's body below its contract.

    Args:
        body_file: the file that holds an exercise's body; None withholds it, and the text says what opens it.
    """
    lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    for contract in reversed(catalogue.contracts_in(path, catalogue.module_name(path))):
        begin, end = contract.node.lineno - 1, contract.node.body[0].end_lineno
        file = body_file(contract)
        body = withheld(contract) if file is None else body_text(contract, file)
        lines[begin:end] = [*contract.text.split("\n"), *body]
    return "\n".join(lines)


def withheld(contract: Contract) -> list[str]:
    return [f"    ...  # your exercise {contract.exercise}; `course solution {contract.exercise}` opens the body"]


def body_text(contract: Contract, file: BodyFile) -> list[str]:
    """The lines of a body: its docstring's reasons as a comment, then its statements as the file has them."""
    node = file.function(contract.function)
    if node is None:
        raise CourseError(f"{file.path} has no function {contract.function}. `course reset {contract.exercise}` brings it back.")
    why = ast.get_docstring(node)
    begin = node.body[0].lineno - 1 if why is None else node.body[0].end_lineno
    lines = file.lines[begin : node.end_lineno]
    if why is None or first_sentence(why) == first_sentence(ast.get_docstring(contract.node)):
        return lines  # a learner's function keeps the contract's docstring, which is printed already
    return [f"    # {part}" for part in textwrap.wrap(" ".join(why.split()), 110)] + lines
