"""Runs slices, each in a process of its own with a limit of time, and keeps their results in one JSON file.

A result belongs to the code and to the machine: with another core, another slice, another PyTorch or another GPU it is not taken for one.
"""

import argparse
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the process of one slice
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from gpu_rows import failures
from slices import SLICES, environment_of

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LIMIT = 480.0  # seconds
CODE = ("shared", "solutions", "tests/gpu", "tests/benchmarks/side_by_side.py")
Record = dict[str, Any]


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def fingerprint_of_code(root: Path = ROOT) -> str:
    """Of every Python file that a slice may run."""
    paths = sorted(path for each in CODE for path in ([root / each] if (root / each).is_file() else (root / each).rglob("*.py")))
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def describe(device: str) -> Record:
    """What a result belongs to. A process of its own asks, because one that has asked keeps some of the GPU's memory."""
    asking = f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); from gpu_machine import Machine; "
    words = [sys.executable, "-c", asking + f"print(json.dumps(Machine({device!r}).describe()))"]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


class Runner:
    """The slices of one machine, and their results in `output / results.json`.

    Args:
        device: cuda or cpu. size: full or small.
        command: name, path for the rows -> the words that run a slice. environment: name -> variables of its process.
        limit: seconds that a slice may take.
    """

    def __init__(
        self, output: Path, device: str, size: str, *, command: Callable[[str, Path], list[str]] | None = None,
        limit: float = LIMIT, machine: Record | None = None, code: str | None = None,
    ):  # fmt: skip
        self.output, self.device, self.size, self.limit = output, device, size, limit
        self.command = command or self.in_a_process
        self.machine = machine if machine is not None else describe(device) if device == "cpu" or gpu_is_there() else {}
        self.code = code or fingerprint_of_code()
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "results.json"

    @property
    def belongs_to(self) -> Record:
        return {"machine": self.machine, "code": self.code, "device": self.device, "size": self.size}

    def records(self) -> dict[str, Record]:
        """All results of the file, whatever they belong to."""
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}

    def kept(self, name: str) -> Record | None:
        """The result that a slice has already, of this code and this machine."""
        record = self.records().get(name)
        return record if record and record["belongs_to"] == self.belongs_to else None

    def result(self, name: str, again: bool = False) -> Record:
        """A slice's result: the one that is there, or a new one, which is written at once."""
        if (record := self.kept(name)) and not again:
            print(f"{name}: {record['state']}, {record['when']} (--again runs it once more)")
            return record
        print(f"{name}: running ...", flush=True)
        record = self.run(name)
        self.keep(name, record)
        print(f"{name}: {record['state']}, {len(record['rows'])} rows, {record['seconds']:.0f} s. {record['error'][-400:]}", flush=True)
        for row in record["rows"]:
            print(f"    {row['state']:12} {row['what']}", flush=True)
        return record

    def keep(self, name: str, record: Record) -> None:
        """Write all results, whole or not at all: a run may be stopped at any moment."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.records() | {name: record}, indent=1), encoding="utf-8")
        partial.replace(self.path)

    def run(self, name: str) -> Record:
        """Run a slice in a process of its own, with its children, until it ends or its time is over."""
        rows, log = self.output / f"{name}.rows", self.output / f"{name}.log"
        rows.unlink(missing_ok=True)
        began, error = time.monotonic(), ""
        with log.open("w", encoding="utf-8") as out:
            words = self.command(name, rows)
            process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | self.environment(name), start_new_session=True
            )
            try:
                code = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                code, error = None, f"more than {self.limit:g} s: stopped"
            finally:  # also what it has started, and where this process is interrupted
                end_group(process)
        found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()] if rows.is_file() else []
        if code:
            died = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            error = f"{died}\n{last_lines(log)}"
        elif code == 0 and not found:
            error = "ended without a row"
        return {
            "state": "failed" if error or failures(found) else "started" if self.device == "cpu" else "done",
            "error": error, "rows": found, "seconds": round(time.monotonic() - began, 1), "when": time.strftime("%Y-%m-%d %H:%M"),
            "belongs_to": self.belongs_to,
        }  # fmt: skip

    def in_a_process(self, name: str, rows: Path) -> list[str]:
        return [sys.executable, str(Path(__file__).resolve()), name, str(rows), self.device, self.size]

    def environment(self, name: str) -> dict[str, str]:
        return environment_of(name) if name in SLICES else {}


def end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:])


def main(name: str, path: Path, device: str, small: bool) -> int:
    """One slice, in this process: each row is written as soon as it is known, so that a slice that fails keeps what it found before."""
    from gpu_machine import Machine

    machine = Machine(device)
    with path.open("a", encoding="utf-8") as out:
        try:
            for row in importlib.import_module(f"slices.{name}").run(machine, small):
                out.write(json.dumps(row.as_json(machine.is_gpu)) + "\n")
                out.flush()
        except Exception:  # of whatever kind: the runner reads the exit code, and shows the end of this log in the table
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=SLICES)
    parser.add_argument("rows", type=Path)
    parser.add_argument("device")
    parser.add_argument("size")
    words = parser.parse_args()
    sys.exit(main(words.name, words.rows, words.device, words.size == "small"))
