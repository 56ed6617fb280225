"""The results as Markdown, and their place in the benchmarks' README."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_rows import in_words

README = Path(__file__).resolve().parents[1] / "benchmarks" / "README.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"


def table(records: dict[str, Any], sentence_of: Callable[[str], str]) -> str:
    """A line about each machine, and a table for each slice."""
    parts = []
    for name, record in records.items():
        machine = ", ".join(f"{key} {value}" for key, value in record["belongs_to"]["machine"].items())
        ended = f"{record['state'].capitalize()} after {record['seconds']:.0f} s, {record['when']}: {machine}."
        parts.append(f"### {name}\n\n{sentence_of(name)}\n\n{ended}")
        if record["error"]:
            parts.append("```\n" + record["error"].strip() + "\n```")
        if record["rows"]:
            columns = ((row["what"], row["state"], in_words(row["figures"]), row["note"]) for row in record["rows"])
            lines = [f"| {' | '.join(map(cell, each))} |" for each in columns]
            parts.append("| what | state | figures | note |\n|---|---|---|---|\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_into(readme: Path, text: str) -> None:
    """Replace what stands between the two marks.

    Raises:
        ValueError: the file lacks them.
    """
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no place for the table: put {BEGIN} and {END} there.")
    readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
