"""The text agrees with what it describes: figures with printed outputs, links with files, tables with the core.

A number of three or more significant digits in a notebook's text must stand in one of its outputs. Exempt are code in
backticks, formulas between dollar signs, years, sentences that say that a number is exact, and the names in NAMES.
"""

import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from shared.course import catalogue, reading
from shared.course.paths import CHECKOUT

CHAPTERS = list(catalogue.chapters().values())
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.slug)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")
NAMES = ("RTX 3090", "issue 34191", "-100")
TEXTS = [CHECKOUT / "README.md", *CHECKOUT.glob("chapters/*/README.md")]


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


@by_chapter
def test_the_chapters_page_lists_its_exercises_and_rooms(chapter):
    folder = CHECKOUT / "chapters" / chapter.slug
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| (\d+) \| (\d) \|$", text, re.M)
    told = tomllib.loads((folder / "exercises.toml").read_text(encoding="utf-8"))["exercise"]
    assert rows == [(entry["id"], entry["title"], str(entry["minutes"]), str(entry["difficulty"])) for entry in told]
    rooms = re.findall(r"^\| `(shared[\w.]+)` \|", text, re.M)
    assert sorted(rooms) == sorted(room.module for room in reading.rooms(chapter.number))
