"""Links of notebooks lead somewhere: to files, to headings of pages; and percentages that they state of a run were printed by one.

A percentage is looked for among the outputs of the notebook, or in a page that its paragraph links. Exempt are code, formulas, what a
sentence calls exact, as in `test_prose.py`, and NOT_MEASURED.
"""

import re
from pathlib import Path

import nbformat
import pytest

from shared.course import catalogue
from shared.course.paths import CHECKOUT

CHAPTERS = list(catalogue.chapters().values())
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.slug)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PERCENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?%")
# No results: settings, cited figures, "80 % of the cases" as an example, and quotients of two printed times (08).
NOT_MEASURED = {"03": {"15"}, "04": {"46", "100"}, "08": {"3", "5"}, "09": {"40"}, "11": {"80"}}


def texts(chapter: catalogue.Chapter) -> list[str]:
    return [cell.source for cell in nbformat.read(chapter.notebook, as_version=4).cells if cell.cell_type == "markdown"]


def anchors(page: Path) -> set[str]:
    """What a page's headings are reached by: lower case, spaces as hyphens, without other signs (GitHub's rule)."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(links: list[str], folder: Path) -> list[str]:
    """The links from a page in `folder` that lead nowhere."""
    found = []
    for link in links:
        file, _, anchor = link.partition("#")
        if not link.startswith(("http", "attachment:")):
            page = folder / file
            if not page.exists() or anchor and anchor not in anchors(page):
                found.append(link)
    return found


def unprinted(paragraph: str, shown: set[str], folder: Path) -> list[str]:
    """The percentages of a paragraph that no output shows, nor a page that it links."""
    pages = [folder / link.partition("#")[0] for link in LINK.findall(paragraph) if not link.startswith(("http", "attachment:"))]
    allowed = shown | {number for page in pages if page.suffix == ".md" for number in PERCENT.findall(page.read_text(encoding="utf-8"))}
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", " ", paragraph, flags=re.S)
    sentences = [sentence for sentence in re.split(r"(?<=[.!?:])\s", text) if "exact" not in sentence]
    return [number for sentence in sentences for number in PERCENT.findall(sentence) if number not in allowed]


@by_chapter
def test_links_and_anchors_of_notebooks_resolve(chapter):
    assert broken([link for text in texts(chapter) for link in LINK.findall(text)], CHECKOUT / "notebooks") == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "PAGE.md").write_text("# One page\n\n## What it's for: 2 things\n")
    good = ["PAGE.md", "PAGE.md#one-page", "PAGE.md#what-its-for-2-things", "https://example.org/x"]
    assert broken([*good, "STUDIES.md", "PAGE.md#another"], tmp_path) == ["STUDIES.md", "PAGE.md#another"]


@by_chapter
def test_percentages_in_the_notebooks_text_were_printed(chapter):
    notebook = nbformat.read(chapter.notebook, as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = {number for output in outputs for number in PERCENT.findall(output.get("text", "") or output.get("evalue", ""))}
    shown |= NOT_MEASURED.get(chapter.number, set())
    paragraphs = [paragraph for text in texts(chapter) for paragraph in text.split("\n\n")]
    assert [number for paragraph in paragraphs for number in unprinted(paragraph, shown, CHECKOUT / "notebooks")] == []


def test_percentages_that_nothing_shows_are_found(tmp_path):
    (tmp_path / "PAGE.md").write_text("| 12 % | 48 % |\n")
    text = "It was 61% before and 86 % after; `99%`, $5\\%$. Others end at 48 % ([page](PAGE.md)). That is exactly 25 %. Then 12.5 %."
    assert unprinted(text, {"61"}, tmp_path) == ["86", "12.5"]


def test_the_page_of_several_orders_has_the_figures_that_notebook_12_prints():
    """`tests/tables/notebook_seeds.py` runs the notebook's cells with orders of which the first is the notebook's own."""
    outputs = [cell.outputs for cell in nbformat.read(catalogue.chapters()["12"].notebook, as_version=4).cells if cell.cell_type == "code"]
    text = "".join(output.get("text", "") for each in outputs for output in each)
    printed = re.findall(r"^(right answers|format|a coin) +(?:12|24) +(\d+)% +(\d+)% +(\d+)%$", text, re.M)
    page = (CHECKOUT / "chapters" / "12_grpo" / "PRACTICE.md").read_text(encoding="utf-8")
    rows = {name: cells for name, *cells in re.findall(r"^\| ([\w ]+) \| 5 \| ([^|]+) \| ([^|]+) \|$", page, re.M)}
    assert len(printed) == 6
    written = [(name, ", ".join(f"{share} %" for share in shares)) for name, *shares in printed]
    assert rows == {name: [cell for same, cell in written if same == name] for name, _ in written}
