"""What the course costs: seconds and peak memory of each chapter's notebook and run, measured here and now.

    python tests/benchmarks/costs.py            prints the table
    python tests/benchmarks/costs.py --write    also puts it into README.md, between its two markers

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
        script = CHECKOUT / "chapters" / chapter.slug / "run.py"
        return measure([sys.executable, str(script), "--output", folder], CHECKOUT)


def table() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    lines = ["| chapter | on | notebook | `make run CHAPTER=NN` |", "|---|---|---|---|"]
    for chapter in catalogue.chapters().values():
        costs = [notebook_cost(chapter), run_cost(chapter)]
        cells = [f"{cost.seconds:.0f} s, {cost.gigabytes:.1f} GB" for cost in costs]
        lines.append(f"| {chapter.slug} | {device} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(text: str) -> None:
    readme = CHECKOUT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = re.sub(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", text + "\n", old, flags=re.S)
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    measured = table()
    print(measured)
    if "--write" in sys.argv[1:]:
        write(measured)
