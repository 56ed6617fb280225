"""What the course costs: seconds and peak memory of each chapter's notebook and run, measured here and now.

    python tests/benchmarks/costs.py                  prints the table
    python tests/benchmarks/costs.py 03 05 --write    only these chapters; also puts their rows into chapters/COSTS.md

A machine's speed moves by a factor of up to two between minutes: the table says what to expect, it compares nothing.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from shared.course import catalogue
from shared.course.paths import CHECKOUT

BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"


@dataclass(frozen=True)
class Cost:
    seconds: float
    gigabytes: float  # of the largest process


def measure(command: list[str], cwd: Path) -> Cost:
    """Run a command to its end and measure it; a command that fails is an error, not a row.

    Raises:
        subprocess.CalledProcessError: the command's exit code was not 0.
    """
    began = time.perf_counter()
    child = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    kilobytes = usage.ru_maxrss if sys.platform == "linux" else usage.ru_maxrss / 1024  # macOS counts bytes
    return Cost(time.perf_counter() - began, kilobytes / 1e6)


def notebook_cost(chapter: catalogue.Chapter) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        command = ["jupyter", "nbconvert", "--execute", "--to", "notebook", "--output-dir", folder, str(chapter.notebook)]
        return measure([sys.executable, "-m", *command], chapter.notebook.parent)


def run_cost(chapter: catalogue.Chapter) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        home = CHECKOUT / "chapters" / chapter.slug
        settings = yaml.safe_load((home / "run.yaml").read_text(encoding="utf-8"))
        option = "--output" if "output" in settings else "--engine.output"  # the engine has a folder of its own from chapter 04 on
        return measure([sys.executable, str(home / "run.py"), option, folder], CHECKOUT)


def row(chapter: catalogue.Chapter) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    cells = [f"{cost.seconds:.0f} s, {cost.gigabytes:.1f} GB" for cost in (notebook_cost(chapter), run_cost(chapter))]
    return f"| {chapter.slug} | {device} | {' | '.join(cells)} |"


def write(text: str, measured: str) -> str:
    """The page's text with a measured row in the place of the chapter's old one, or where it belongs among the others."""
    head, between, tail = re.fullmatch(f"(.*{re.escape(BEGIN)}\n)(.*?)({re.escape(END)}.*)", text, re.S).groups()
    title, rule, *rows = between.splitlines()
    slug = lambda line: line.split("|")[1].strip()  # noqa: E731
    kept = {slug(line): line for line in rows} | {slug(measured): measured}
    return head + "\n".join([title, rule, *(kept[name] for name in sorted(kept))]) + "\n" + tail


def main(words: list[str]) -> None:
    page = CHECKOUT / "chapters" / "COSTS.md"
    asked = [word for word in words if word != "--write"]
    for number, chapter in catalogue.chapters().items():
        if not asked or number in asked:
            measured = row(chapter)
            print(measured, flush=True)
            if "--write" in words:
                page.write_text(write(page.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
