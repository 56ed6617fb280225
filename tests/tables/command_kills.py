"""Whole commands that are killed in exports, in reports, at borders of a pipeline's stages, while they quantize or evaluate, and resumed.

`python tests/tables/command_kills.py [--kills 4] [--seed 0] [ROW ...]`. Each command is killed with all its processes (SIGKILL) when a file
of a moment appears, or after a share of its time, and given again until it ends. Its files are compared, bit for bit, with those of the
same command that nobody killed; no unfinished file may be left, and metrics.jsonl has each step once.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from pipelines import command as pipeline_command  # noqa: E402
from pipelines import pipeline_file  # noqa: E402
from trainer_runs import SOURCE, TRAIN, settings_file  # noqa: E402
from tuned_runs import SIZES, tuned_file  # noqa: E402

from shared.course.paths import CHECKOUT  # noqa: E402

QUANTIZE = CHECKOUT / "chapters" / "10_finetuning" / "quantize.py"
LORA = ("adapter.rank=4", "optimizer.name=adamw")
EXPORT = ("model/*.partial", "model/config.json", "model/tokenizer.json")
REPORT = ("figures/*", "report.html*", "results.json*")
STAGES = ("pretrain", "sft", "dpo", "grpo")
COLUMNS = ("command", "kills", "at", "starts", "unfinished files left", "files")


@dataclass(frozen=True)
class Row:
    """A command and when it is killed.

    Args:
        words: the command that writes into a folder.
        moments: patterns of files in the folder; a number is a share of the undisturbed command's time.
        kept: patterns of the files that must be the same.
    """

    words: Callable[[Path], list[str]]
    moments: tuple[str | float, ...]
    kept: tuple[str, ...] = ("**/model/*.safetensors", "**/adapter/*", "**/checkpoints/*/*.safetensors")


@dataclass
class Found:
    kills: Counter = field(default_factory=Counter)
    starts: int = 0
    left: int = 0
    differing: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)


def rows_of(scratch: Path) -> dict[str, Row]:
    base, text = scratch / "base" / "run", scratch / "text.txt"
    text.write_text("def answer(question):\n    return 42\n" * 60)

    def trained(file: Path, *words: str) -> Callable[[Path], list[str]]:
        return lambda folder: [sys.executable, str(TRAIN), str(file), *words, f"engine.output={folder}"]

    def quantized(folder: Path) -> list[str]:
        places = ["--model", str(base / "model"), "--data", str(SOURCE), "--output", str(folder)]
        return [sys.executable, str(QUANTIZE), *places, *"--rows 8 --seq 32 --held_out_rows 8 --group 32 --method gptq".split()]

    def evaluated(folder: Path) -> list[str]:
        return [sys.executable, "-m", "shared.course.cli", "eval", str(base), "--data", str(text), "--output", str(folder / "eval.json")]

    def chained(folder: Path) -> list[str]:
        return pipeline_command(pipeline_file(folder, output=str(folder / "all")))

    pretrain = settings_file(scratch / "base", scratch / "prepared", model=SIZES)
    sft = tuned_file(scratch / "sft", base)
    return {
        "pretrain": Row(trained(pretrain), (*EXPORT, *REPORT)),
        "sft": Row(trained(sft), (*EXPORT, *REPORT)),
        "sft_lora": Row(trained(sft, *LORA), ("adapter/*", *EXPORT, *REPORT)),
        "pipeline": Row(chained, tuple(f"all/{stage}/results.json" for stage in STAGES[:-1]), ("all/*/model/*.safetensors",)),
        "quantize": Row(quantized, ("model/*", 0.6, 0.75, 0.9), ("model/*",)),
        "eval": Row(evaluated, (0.5, 0.7, 0.85, 0.95), ("eval.json",)),
    }


def started(words: list[str], log: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    with log.open("a") as output:
        return subprocess.Popen(words, stdout=output, stderr=output, env=environment, preexec_fn=lambda: os.nice(10))  # noqa: PLW1509


def kill_all(process: subprocess.Popen) -> None:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        parent.suspend()  # it starts no more
        for each in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def has_come(moment: str | float, folder: Path, began: float, whole: float) -> bool:
    if isinstance(moment, float):
        return time.time() - began > moment * whole
    for path in folder.glob(moment):
        with suppress(OSError):  # it was renamed meanwhile
            if path.stat().st_mtime > began:
                return True
    return False


def killed(row: Row, folder: Path, kills: int, whole: float, generator: random.Random) -> Found:
    """The command, killed so often at moments in turn, then given until it ends."""
    found, log = Found(), folder.with_suffix(".txt")
    for number in range(kills + 1):
        words, began = row.words(folder), time.time()
        process, moment = started(words, log), row.moments[number % len(row.moments)]
        found.starts += 1
        while process.poll() is None and not (number < kills and has_come(moment, folder, began, whole)):
            time.sleep(0.001 if number < kills else 0.1)
        if process.poll() is None:
            time.sleep(generator.uniform(0, 0.02))
            kill_all(process)
            found.kills[str(moment)] += 1
        elif process.returncode:
            found.strange.append(f"exit code {process.returncode}: {log.read_text()[-600:]}")
    return found


def digests(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def repeated_steps(folder: Path) -> Iterator[str]:
    for path in folder.rglob("metrics.jsonl"):
        steps = Counter(json.loads(line)["step"] for line in path.read_text().splitlines() if "train/loss" in line)
        yield from (f"{path}: step {step} {count} times" for step, count in steps.items() if count > 1)


def compared(name: str, row: Row, kills: int, seed: int, scratch: Path) -> Found:
    whole, folder = (scratch / kind / name for kind in ("whole", "killed"))
    for each in (whole, folder):
        each.mkdir(parents=True)
    began = time.time()
    if code := started(row.words(whole), whole.with_suffix(".txt")).wait():
        return Found(strange=[f"undisturbed: exit code {code}: {whole.with_suffix('.txt').read_text()[-600:]}"])
    found = killed(row, folder, kills, time.time() - began, random.Random(f"{seed} {name}"))
    wanted, seen = digests(whole, row.kept), digests(folder, row.kept)
    found.differing = sorted(each for each in wanted.keys() | seen.keys() if wanted.get(each) != seen.get(each))
    found.differing += [] if wanted else ["no file"]
    found.left = sum(path.is_file() for path in folder.rglob("*.partial"))
    found.strange += repeated_steps(folder)
    return found


def line(name: str, found: Found) -> str:
    places = ", ".join(f"{count} {moment}" for moment, count in found.kills.items())
    same = "OTHER: " + ", ".join(found.differing) if found.differing else "the same"
    cells = (name, found.kills.total(), places, found.starts, found.left, same)
    return "| " + " | ".join(map(str, cells)) + " |" + "".join(f"\n  STRANGE: {each}" for each in found.strange)


def table(scratch: Path, names: Sequence[str], kills: int, seed: int) -> Iterator[tuple[str, Found]]:
    """The rows of some commands, all of them unless given, over a base model that is trained first."""
    rows = rows_of(scratch)
    if started(rows["pretrain"].words(scratch / "base" / "run"), scratch / "base.txt").wait():
        raise RuntimeError((scratch / "base.txt").read_text()[-2000:])
    for name in names or rows:
        yield name, compared(name, rows[name], kills, seed, scratch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="pretrain, sft, sft_lora, pipeline, quantize, eval; all unless given")
    parser.add_argument("--kills", type=int, default=4, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        total = 0
        for name, found in table(Path(place), options.rows, options.kills, options.seed):
            total += found.kills.total()
            print(line(name, found), flush=True)
    print(f"{total} kills.")
