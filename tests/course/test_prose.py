"""The text agrees with what it describes: figures with printed outputs, links with files, tables with the core.

A number of three or more significant digits in a notebook's text must stand in one of its outputs. Exempt are code in
backticks, formulas between dollar signs, years, sentences that say that a number is exact, and the names in NAMES.
"""

import ast
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import nbformat
import pytest

from shared.course import catalogue, reading
from shared.course.paths import CHECKOUT

CHAPTERS = list(catalogue.chapters().values())
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.slug)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")
NAMES = ("RTX 3090", "issue 34191", "-100")
GLOSSARY = CHECKOUT / "chapters" / "GLOSSARY.md"
TEXTS = [CHECKOUT / "README.md", GLOSSARY, *CHECKOUT.glob("chapters/*/README.md")]


def significant(number: str) -> int:
    """How many significant digits a number is written with; the zeros that end a whole number do not count."""
    digits = number.replace(",", "")
    return len(digits.replace(".", "").lstrip("0") if "." in digits else digits.strip("0"))


def quoted_figures(text: str) -> list[str]:
    """The numbers of a text that must have been measured."""
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\([^)]*\]\([^)]*\)", " ", text, flags=re.S)
    for name in NAMES:
        text = text.replace(name, " ")
    sentences = [sentence for sentence in re.split(r"(?<=[.!?:])\s", text) if "exact" not in sentence]
    found = [number.rstrip(",") for sentence in sentences for number in NUMBER.findall(sentence)]
    return [number for number in found if significant(number) >= 3 and not re.fullmatch(r"(19|20)\d\d", number)]


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text", "") or output.get("evalue", "") for output in outputs)


@by_chapter
def test_figures_in_the_notebooks_text_were_printed(chapter):
    notebook = nbformat.read(chapter.notebook, as_version=4)
    shown = set(NUMBER.findall(printed(notebook)))
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not [number for number in quoted_figures(text) if number not in shown and number.replace(",", "") not in shown]


def test_the_search_for_figures_finds_them():
    """The negative control of the test above."""
    text = "It has 271,104 parameters and costs 3.67 bits (Shannon 1948). `x = 12345`; $2^{100}$. That is exactly 4321. Step 300, 12."
    assert quoted_figures(text) == ["271,104", "3.67"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("http")]
    targets += [name for name in re.findall(r"`((?:chapters|notebooks|solutions|shared|tests)/[\w/.]+)`", text) if "NN" not in name]
    for target in targets:
        base = path.parent if not target.startswith(("chapters/", "notebooks/", "solutions/", "shared/", "tests/")) else CHECKOUT
        assert Path(base, target).exists(), f"{path} points to {target}"


def glossary_rows() -> list[tuple[str, str, str]]:
    """(the field's word, where it is here, chapter) of each row."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d, ]+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.M)
    return [row for row in rows if row[0] != "---"]


def defined_in(path: Path) -> set[str]:
    """The names that a file defines: functions, classes, methods as `Class.method`, constants, fields of classes."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found |= {prefix + node.name} | (names(node.body, f"{node.name}.") if isinstance(node, ast.ClassDef) else set())
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return names(ast.parse(path.read_text(encoding="utf-8")).body)


def keys_of(config: type, prefix: str = "") -> set[str]:
    """Every key of a configuration, dotted."""
    keys = {prefix + field.name for field in fields(config)}
    return keys.union(*(keys_of(field.type, f"{prefix}{field.name}.") for field in fields(config) if is_dataclass(field.type)))


def test_glossary_points_to_what_exists():
    from shared.trainer.config import TrainerConfig

    keys = keys_of(TrainerConfig)
    for word, places, chapters in glossary_rows():
        openings = []
        for place in places.split("; "):
            path = Path(GLOSSARY.parent, re.match(r"\[`[^`]+`\]\(([^)]+)\)", place)[1]).resolve()
            opening = re.match(r"Chapter (\d\d)\.", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
            openings.append(opening[1] if opening else path.parent.name[:2])
            named = set(re.findall(r"`([^`]+)`", place.partition("): ")[2]))
            assert named and named <= defined_in(path) | keys, f"{word}: {named - defined_in(path) - keys} is not in {path.name}"
        assert chapters == ", ".join(sorted(set(openings))), word


def test_a_search_for_a_word_of_the_glossary_finds_its_file():
    """One of a row's words is in the module's opening paragraph, or in the docstring of a symbol that the row names."""

    def normal(text: str) -> str:
        return " ".join(text.lower().replace("-", " ").split())

    for words, places, _ in glossary_rows():
        path = Path(GLOSSARY.parent, re.search(r"\]\(([^)]+)\)", places)[1]).resolve()
        named = {name.split(".")[-1] for name in re.findall(r"`(\w[\w.]*)`", places)}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        symbols = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in named]
        opening = (ast.get_docstring(tree) or "").split("\n\n")[0]
        found = normal(" ".join([opening, *(ast.get_docstring(node) or "" for node in symbols)]))
        assert any(normal(word) in found for word in words.split(",")), f"a search for {words!r} does not find {path.name}"


def test_glossary_has_each_word_once():
    words = [word.strip() for row in glossary_rows() for word in row[0].split(",")]
    assert len(glossary_rows()) >= 60 and len(words) == len(set(words))


def test_readme_names_every_folder_of_the_core():
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    block = text[text.index("\nshared/ ") :].partition("```")[0]
    rows = {line.split()[0].strip("/"): line for line in block.splitlines() if line.startswith("  ")}
    folders = [path for path in (CHECKOUT / "shared").iterdir() if path.is_dir() and path.name not in ("__pycache__", "course")]
    assert {folder.name for folder in folders} == rows.keys() - {"*.py"}
    for folder in folders:
        inside = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("__")}
        assert {name.strip("/") for name in rows[folder.name].split() if name.endswith("/")} == inside | {folder.name}


@by_chapter
def test_the_chapters_page_lists_its_exercises_and_modules(chapter):
    folder = CHECKOUT / "chapters" / chapter.slug
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| (\d+) \| (\d) \|$", text, re.M)
    told = tomllib.loads((folder / "exercises.toml").read_text(encoding="utf-8"))["exercise"]
    assert rows == [(entry["id"], entry["title"], str(entry["minutes"]), str(entry["difficulty"])) for entry in told]
    rooms = re.findall(r"^\| `(shared[\w.]+)` \|", text, re.M)
    assert sorted(rooms) == sorted(room.module for room in reading.rooms(chapter.number))
