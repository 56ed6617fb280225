"""Runs under torchrun in which something goes wrong, and the table of what followed: `python tests/tables/fault_table.py [NAME ...]`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

SUPPORT = Path(__file__).parents[1] / "support"
sys.path[:0] = [str(SUPPORT)]  # as a script; pytest has it already

from ports import reserved_port  # noqa: E402

COMMAND = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = [str(SUPPORT / "parallel_script.py")]


@dataclass(frozen=True)
class Run:
    """what: the fault, in words. options: of the script. names: words that the first complaint must hold. within: seconds until it."""

    what: str
    options: str
    names: str
    within: float
    nodes: int = 1


SLOW = "--slow 0.3 --timeout 4"
RUNS = {
    "kill": Run("rank 1 is killed (SIGKILL) in mid-step", f"--fault kill {SLOW}", "rank 1 has sent no heartbeat", 60),
    "stop": Run("rank 1 is stopped (SIGSTOP): its process hangs", f"--fault stop {SLOW}", "rank 1 has sent no heartbeat", 60),
    "sleep": Run("rank 1 sleeps for ever", f"--fault sleep --collective-timeout 5 {SLOW}", "rank 1 is alive and has not joined", 60),
    "error": Run("rank 1 alone raises an error", f"--fault error {SLOW}", "rank 1 ends: a file", 60),
    "elsewhere": Run("rank 1 calls a barrier that nobody else calls", f"--fault elsewhere {SLOW}", "deadlock: rank 0 waits", 60),
    "once more": Run("rank 1 adds up its totals once more than the others", f"--fault more {SLOW}", "mismatch: in operation #", 60),
    "nudge": Run("one weight of rank 1 changes in its last bit", f"--fault nudge {SLOW}", "the weights of rank 1 differ from", 60),
    "two nodes": Run("two machines; rank 1, on the second, is killed", f"--fault kill {SLOW}", "rank 1 has sent no heartbeat", 60, 2),
}


@dataclass(frozen=True)
class Found:
    """seconds: from the fault to the first complaint. sentence: that. resumed: the step that the restarted ranks went on from."""

    seconds: float
    sentence: str
    resumed: int | None
    ended_well: bool
    same_weights: bool
    took: float


def run_fault(run: Run, folder: Path) -> Found:
    """A run with the fault, under torchrun, beside one without it."""
    whole, broken = folder / "whole", folder / "broken"
    if not whole.exists():
        start([], whole, "", 1)
    began = time.monotonic()
    codes, output = start(["--max-restarts", "1"], broken, run.options, run.nodes)
    took = time.monotonic() - began
    fault = re.search(r"fault at (\S+)", output)
    complaint = re.search(r"at (\d\S+) rank \d+ ends: .*?(?=at \d{10}|\n)", output)
    resumed = re.search(r"Going on from step (\d+)", output)
    same = (broken / "weights.safetensors").exists() and equal(broken, whole)
    seconds = float(complaint[1]) - float(fault[1]) if fault and complaint else float("nan")
    sentence = complaint[0].split(" ", 2)[2] if complaint else output[-3000:]
    return Found(seconds, sentence, int(resumed[1]) if resumed else None, not any(codes), same, took)


def equal(one: Path, other: Path) -> bool:
    first, second = (load_file(each / "weights.safetensors") for each in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def start(options: list[str], folder: Path, words: str, nodes: int) -> tuple[list[int], str]:
    """Two ranks, on one machine or on what take themselves for two. Returns torchrun's exit codes and all that was printed."""
    places = ["--nproc-per-node", str(2 // nodes), "--nnodes", str(nodes)]
    places += ["--rdzv-backend", "c10d", "--rdzv-id", "faults", "--local-addr", "localhost"]
    command = [*places, *options, *SCRIPT, str(folder), *words.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryFile("w+") as output, reserved_port() as port:
        started, command = [], [*COMMAND, "--rdzv-endpoint", f"localhost:{port}", *command]
        try:
            started = [subprocess.Popen(command, stdout=output, stderr=output, env=environment) for _ in range(nodes)]
            codes = [each.wait(timeout=240) for each in started]
        finally:
            for each in started:
                each.terminate()  # torchrun ends its ranks; nothing happens to one that has ended
                each.wait()
        output.seek(0)
        return codes, output.read()


def row(run: Run, found: Found) -> str:
    followed = f"all start again from step {found.resumed}, and end with {'the same' if found.same_weights else 'OTHER'} weights"
    return f"| {run.what} | {found.seconds:.1f} | {found.sentence.strip()} | {followed if found.ended_well else 'the run ends'} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RUNS), help=", ".join(RUNS))
    print("| fault | seconds until it is named | who says what | what follows |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name in parser.parse_args().names:
            found = run_fault(RUNS[name], Path(scratch))
            print(row(RUNS[name], found), flush=True)
            shutil.rmtree(Path(scratch, "broken"), ignore_errors=True)
