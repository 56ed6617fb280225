"""The house rules that a reader relies on: floors import downwards, bodies stand once, stubs are the contracts."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from children import in_child
from conftest import FOLDERS
from first_imports import FINE, import_each_first
from import_graph import circles, import_graph
from scripts import run_script

from shared.course import catalogue, stubs
from shared.course.paths import CHECKOUT
from shared.trainer.provenance import git

FLOOR_0 = sorted((CHECKOUT / "shared" / "course").glob("*.py"))
CORE = catalogue.core_files()
CHAPTERS = list(catalogue.chapters().values())
by_name = pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(CHECKOUT)))
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.slug)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def floor_of(module: str) -> int | None:
    """The chapter that a module of the core belongs to, as its docstring opens; 0 for the learner's tools."""
    if module.startswith("shared.course") or module == "shared":
        return 0
    path = CHECKOUT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return None
    docstring = ast.get_docstring(tree_of(path)) or ""
    opening = docstring.split(".", 1)[0].split()
    assert opening[:1] == ["Chapter"] and opening[1].isdigit(), f"{path} must open with the chapter that it belongs to"
    return int(opening[1])


def imported_modules(tree: ast.AST) -> set[str]:
    """The modules of this project that a tree imports anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if floor_or_none(name) is not None} or {node.module}
    return {name for name in found if name.split(".")[0] in ("shared", "solutions", "tests", "chapters")}


def floor_or_none(module: str) -> int | None:
    return floor_of(module) if module.startswith("shared") else None


@by_name
def test_a_floor_imports_only_lower_floors(path):
    own = floor_of(catalogue.module_name(path))
    imported = imported_modules(tree_of(path))
    assert not {name for name in imported if not name.startswith("shared")}
    above = {name: floor_of(name) for name in imported if (floor_of(name) or 0) > own}
    assert not above, f"{path} stands on floor {own} and imports upwards: {above}"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count, and those for annotations, under `if TYPE_CHECKING`."""
    assert not circles(import_graph(annotations=True))


def test_import_circles_are_found():
    """The negative control of the test above."""
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert circles(graph) == [{"a", "b", "c"}, {"f", "g"}]


@pytest.mark.parametrize("path", FLOOR_0, ids=lambda path: path.name)
def test_the_learners_tools_import_no_floor(path):
    """Neither at the top nor inside a function: a floor that brings commands registers them (`shared/*/commands.py`)."""
    assert not {name for name in imported_modules(tree_of(path)) if not name.startswith("shared.course")}


@pytest.fixture(scope="module")
def first_imports():
    holes = {catalogue.module_name(path): [] for path in CORE}
    for contract in catalogue.contracts().values():
        holes[contract.module].append(contract.function)
    return in_child(import_each_first, holes, seconds=600)


@by_name
def test_every_module_can_be_the_first_to_be_imported(path, first_imports):
    """Bodies reach the core through its modules; whichever module comes first, every hole must be filled."""
    assert first_imports[catalogue.module_name(path)] == FINE


@by_chapter
def test_solutions_import_no_exercise_by_name(chapter):
    """An import by name would copy the function before its hole is filled, and would pin one implementation."""
    tree = tree_of(chapter.solution_file)
    holes = {(contract.module, contract.function) for contract in catalogue.contracts().values()}
    named = {(node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not named & holes
    assert all((floor_of(name) or 0) <= int(chapter.number) for name in imported_modules(tree) if name.startswith("shared"))


def test_contracts_hold_a_docstring_and_nothing_else():
    for contract in catalogue.contracts().values():
        assert len(contract.node.body) == 1 and ast.get_docstring(contract.node), contract.exercise
        assert contract.exercise.split(".", 1)[1] == contract.function


def test_every_contract_is_taught_and_every_lesson_has_its_contract():
    assert set(catalogue.all_exercises()) == set(catalogue.contracts())
    for exercise in catalogue.all_exercises().values():
        assert 1 <= exercise.difficulty <= 5 and exercise.minutes > 0 and exercise.title
        assert len(exercise.hints) == 3 and all(hint.strip() for hint in exercise.hints) and exercise.after.endswith("?")
        assert set(exercise.needs) <= set(catalogue.all_exercises()), f"{exercise.id} needs what does not exist"
    assert all(3 <= len(chapter.exercises) <= 8 for chapter in CHAPTERS)


def functions(path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]


def test_no_function_body_is_duplicated():
    """A body in `solutions/` must not also stand in the core, under whatever name."""
    bodies = {}
    for path in [*CORE, *(chapter.solution_file for chapter in CHAPTERS)]:
        for node in functions(path):
            statements = stubs.without_docstring(node)
            if statements and len(ast.unparse(ast.Module(statements, []))) > 40:
                bodies.setdefault("".join(map(ast.dump, statements)), []).append(f"{path.name}:{node.name}")
    twice = [places for places in bodies.values() if len(places) > 1]
    assert not twice


@by_chapter
def test_stubs_are_what_the_generator_makes(chapter):
    """Functions that a learner has edited are the learner's; every other must be the contract's own text."""
    file = stubs.BodyFile.read(chapter.stub_file(CHECKOUT))
    for exercise in chapter.exercises:
        if not file.attempted(exercise):
            assert file.text(exercise.name) == stubs.stub_of(exercise.contract).rstrip("\n"), f"run `course stubs {chapter.number}`"


@by_chapter
def test_a_fresh_stub_file_loads_and_is_unattempted(chapter, tmp_path):
    path = tmp_path / "exercises.py"
    path.write_text(stubs.stub_file(chapter), encoding="utf-8")
    assert run_script(path, cwd=CHECKOUT).returncode == 0
    file = stubs.BodyFile.read(path)
    assert not any(file.attempted(exercise) for exercise in chapter.exercises)
    solution = stubs.BodyFile.read(chapter.solution_file)
    for exercise in chapter.exercises:
        body = "\n".join(map(ast.unparse, stubs.without_docstring(solution.function(exercise.name))))
        assert body not in path.read_text(encoding="utf-8")


BANNED = ("let go", "whoever", "something to do meanwhile", "for ever", "anew")  # phrases that sound translated


@by_name
def test_docstrings_open_with_a_sentence_and_avoid_banned_phrases(path):
    tree = tree_of(path)
    first = ast.get_docstring(tree).split("\n\n")[0].removeprefix(f"Chapter {floor_of(catalogue.module_name(path)):02}.").strip()
    assert len(first.split()) >= 3 and first.endswith((".", ":", "!", "?")), f"{path} opens with {first!r}"
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    text = " ".join(" ".join((ast.get_docstring(node) or "").lower().split()) for node in nodes)
    assert not [phrase for phrase in BANNED if re.search(rf"\b{phrase}\b", text)]


@by_name
def test_modules_have_at_most_300_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


def python_files():
    """The Python files that git tracks; without a repository, which the Docker image leaves out, all those in the project's folders."""
    tracked = git("ls-files", "*.py")
    if tracked:
        return [CHECKOUT / name for name in tracked.splitlines()]
    return [path for folder in ("chapters", "shared", "solutions", "tests") for path in (CHECKOUT / folder).rglob("*.py")]


def test_lines_have_at_most_140_characters():
    """A learner's own files may be written as they like."""
    files = [path for path in python_files() if path.parent.parent.name != "chapters" or path.name not in ("exercises.py", "build.py")]
    lines = {f"{path}:{number}": line for path in files for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)}
    assert not {place: len(line) for place, line in lines.items() if len(line) > 140}


@by_chapter
def test_make_test_knows_the_chapters_folder_of_tests(chapter):
    assert all(any((CHECKOUT / "tests" / folder).glob("test_*.py")) for folder in FOLDERS[chapter.number].split())


@by_chapter
def test_a_chapters_scripts_import_its_own_floor_and_lower_ones(chapter):
    """Whoever stands at chapter 2 has not read chapter 3. The trainer is chapter 12's."""
    for path in sorted((CHECKOUT / "chapters" / chapter.slug).glob("*.py")):
        imported = imported_modules(tree_of(path))
        above = {name for name in imported if (floor_or_none(name) or 0) > int(chapter.number)}
        assert not above, f"{path.name} of chapter {chapter.number} imports {sorted(above)}"
