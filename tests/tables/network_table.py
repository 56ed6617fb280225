"""What happens on several machines when a rank dies or the network fails: `python tests/tables/network_table.py [NAME ...]`.

Machines are namespaces (`two_machines`). torchrun starts the trainer on each of them; when step 10 is saved the fault happens. The table
says which machine spoke after how many seconds and how the run resumed: by itself, or by the same command given again on every machine.
"""

import argparse
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainer_runs import TRAIN, settings_file  # noqa: E402
from two_machines import Job, Machine, Machines, torchrun  # noqa: E402

Fault = Callable[[list[Machine]], None]
SPOKEN = re.compile(
    r"^(rank \d+ (has sent|has had|cannot reach|lost its|has waited|of \d+ could|stopped:)|deadlock|mismatch|Rank \d)|did not connect"
)
TINY = {
    "steps": 40,
    "data": {"batch_size": 24},
    "model": {"hidden_dropout": 0.0},
    "engine": {"log_every": 10, "evaluate_every": 100, "checkpoint": {"every": 5}},
    "report": {"completions": 0},
}
SAVED = "step-00000010"


@dataclass(frozen=True)
class Case:
    """what: the fault, in words. happen: causes it. layout: words of the configuration. per_node: ranks on each machine."""

    what: str
    happen: Fault
    layout: str = "parallel.data_parallel=2"
    backend: str = "course"
    rendezvous: str = "static"
    shared: bool = True
    machines: int = 2
    per_node: int = 1


@dataclass
class Found:
    """By machine: what was said first, with the seconds since the fault; the ranks' exit codes; when torchrun ended, and its code."""

    said: dict[str, tuple[float, str]] = field(default_factory=dict)
    codes: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, tuple[float, int | None]] = field(default_factory=dict)
    resumed: str = ""
    difference: float = float("nan")
    outputs: str = ""


def cut(seconds: float) -> Fault:
    def happen(machines: list[Machine]) -> None:
        machines[-1].cut()
        if seconds < 1000:
            time.sleep(seconds)
            machines[-1].mend()

    return happen


def on_rank(rank: int, number: signal.Signals) -> Fault:
    """Send a signal to a rank, on the last machine where it is not rank 0."""
    return lambda machines: machines[-1 if rank else 0].rank(rank).send_signal(number)


def nothing(machines: list[Machine]) -> None:
    pass


def slow(machines: list[Machine]) -> None:
    for machine in machines:
        machine.slow("10mbit")


FSDP = "parallel.fully_sharded=2"
CASES = {
    "kill": Case("rank 1 is killed", on_rank(1, signal.SIGKILL)),
    "kill 0": Case("rank 0, which holds the folder's lock, is killed", on_rank(0, signal.SIGKILL)),
    "cut": Case("b's link is cut for good", cut(1e6)),
    "cut 50": Case("b's link is cut for 50 s", cut(50)),
    "cut 5": Case("b's link is cut for 5 s", cut(5)),
    "stop": Case("rank 1 is stopped", on_rank(1, signal.SIGSTOP)),
    "stop c10d": Case("rank 1 is stopped", on_rank(1, signal.SIGSTOP), rendezvous="c10d"),
    "stop b": Case("all of b is stopped", lambda machines: machines[1].stop()),
    "stop a": Case("all of a is stopped", lambda machines: machines[0].stop()),
    "power": Case("b loses its power", lambda machines: machines[1].end()),
    "power a": Case("a loses its power", lambda machines: machines[0].end()),
    "slow": Case("links take 10 Mbit/s", slow),
    "kill c10d": Case("rank 1 is killed", on_rank(1, signal.SIGKILL), rendezvous="c10d", backend="torch"),
    "kill 0 c10d": Case("rank 0, which holds the folder's lock, is killed", on_rank(0, signal.SIGKILL), rendezvous="c10d"),
    "cut c10d": Case("b's link is cut for good", cut(1e6), rendezvous="c10d"),
    "cut 50 c10d": Case("b's link is cut for 50 s", cut(50), rendezvous="c10d"),
    "kill fsdp": Case("rank 1 is killed", on_rank(1, signal.SIGKILL), layout=FSDP),
    "cut fsdp": Case("b's link is cut for good", cut(1e6), layout=FSDP, backend="torch"),
    "stop fsdp": Case("rank 0 is stopped", on_rank(0, signal.SIGSTOP), layout=FSDP),
    "three": Case("c's link is cut for good", cut(1e6), layout="parallel.data_parallel=3", machines=3),
    "three c10d": Case("rank 2 is killed", on_rank(2, signal.SIGKILL), layout="parallel.data_parallel=3", machines=3, rendezvous="c10d"),
    "own folders": Case("rank 1 is killed", on_rank(1, signal.SIGKILL), shared=False),
    "own folders cut": Case("b's link is cut for 50 s", cut(50), shared=False, rendezvous="c10d"),
    "own folders fsdp": Case("rank 2 is killed", on_rank(2, signal.SIGKILL), f"parallel.data_parallel=2 {FSDP}", shared=False, per_node=2),
}


def words_of(case: Case, file: Path, output: Path) -> list[object]:
    return [TRAIN, file, f"engine.output={output}", *case.layout.split(), f"parallel.backend={case.backend}"]


def prepared_text(scratch: Path) -> Path:
    """The settings' file, with the text that one process has prepared."""
    file = settings_file(scratch, scratch / "prepared", **TINY)
    if not (scratch / "prepared").exists():
        with Machines(scratch / "prepare", ("a",)) as (a,):
            code, output = a.run(sys.executable, TRAIN, file, f"engine.output={a.folder / 'run'}", "steps=3", timeout=600)
            assert code == 0, output
    return file


def whole(case: Case, scratch: Path) -> dict[str, torch.Tensor]:
    """The weights of a run to which nothing happens, on as many machines."""
    name = re.sub(r"\W", "-", f"whole-{case.layout}-{case.backend}")
    kept = scratch / name / "run" / "run"
    if not (kept / "model" / "model.safetensors").exists():
        shutil.rmtree(scratch / name, ignore_errors=True)
        with Machines(scratch / name, "abc"[: case.machines]) as machines:
            jobs = torchrun(machines, words_of(case, prepared_text(scratch), machines[0].folder / "run"), case.rendezvous, case.per_node)
            codes = [job.wait(600) for job in jobs]
            assert not any(codes), "\n".join(job.output for job in jobs)
    return load_file(kept / "model" / "model.safetensors")


def run_case(case: Case, scratch: Path, limit: float = 120.0) -> Found:
    """limit: seconds from the fault in which torchrun may restart the ranks; then the command is given again, on fresh machines."""
    file, expected, found = prepared_text(scratch), whole(case, scratch), Found()
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=scratch)) / "machines"
    with Machines(folder, "abc"[: case.machines], case.shared) as machines:
        kept = [machine.kept / "run" for machine in machines]
        jobs = torchrun(machines, words_of(case, file, machines[0].folder / "run"), case.rendezvous, case.per_node, ["--max-restarts", "2"])
        deadline = time.monotonic() + 300
        while not (kept[0] / "checkpoints" / SAVED).exists():
            assert time.monotonic() < deadline and all(job.ended is None for job in jobs), "\n".join(job.output for job in jobs)
            time.sleep(0.05)
        at = time.monotonic()
        case.happen(machines)
        while time.monotonic() - at < limit and any(job.ended is None for job in jobs):
            time.sleep(0.2)
        for machine, job in zip(machines, jobs, strict=True):
            note(found, machine.name, job, at)
    finished = all(code == 0 for _, code in found.ended.values())
    found.resumed = "it did not stop" if not (resumed := went_on(jobs)) else f"by itself, {resumed}" if finished else ""
    found.outputs = "\n".join(f"--- {job.machine.name}\n{job.output}" for job in jobs)
    if not finished:
        with Machines(folder, "abc"[: case.machines], case.shared) as machines:
            jobs = torchrun(machines, words_of(case, file, machines[0].folder / "run"), case.rendezvous, case.per_node)
            codes = [job.wait(600) for job in jobs]
            found.resumed = f"the command again, {went_on(jobs) or 'from the start'}" if not any(codes) else f"NOT: exit codes {codes}"
            found.outputs += "\n".join(f"--- again, {job.machine.name}\n{job.output}" for job in jobs)
    if (path := kept[0] / "model" / "model.safetensors").exists():
        weights = load_file(path)
        found.difference = max((weights[name] - expected[name]).abs().max().item() for name in expected)
    shutil.rmtree(folder.parent)
    return found


def went_on(jobs: list[Job]) -> str:
    steps = re.findall(r"Going on (from step \d+)", "\n".join(job.output for job in jobs))
    return steps[0] if steps else ""


def note(found: Found, name: str, job: Job, at: float) -> None:
    spoken = [(when - at, line.strip()) for when, line in list(job.lines) if when >= at and SPOKEN.search(line.strip())]
    if spoken:
        found.said[name] = spoken[0]
    found.codes[name] = [int(code) for code in re.findall(r"exitcode: (-?\d+)", job.output)]
    found.ended[name] = (job.ended - at, job.process.returncode) if job.ended else (float("nan"), None)


def row(case: Case, found: Found) -> str:
    said = [f"{name} after {seconds:.0f} s: {sentence.split(';')[0]}" for name, (seconds, sentence) in found.said.items()]
    codes = ", ".join(f"{name} {' '.join(map(str, dict.fromkeys(codes)))}" for name, codes in found.codes.items() if codes)
    layout = case.layout.replace("parallel.data_parallel=", "dp").replace("parallel.fully_sharded=", "fsdp").replace(" ", "_")
    where = f"{layout}, {case.backend}, {case.rendezvous}, {'one folder' if case.shared else 'own folders'}"
    return f"| {case.what} | {where} | {'; '.join(said) or 'none'} | {codes} | {found.resumed} | {found.difference:.1g} |"


COLUMNS = "layout, backend, rendezvous, output folder | machine, seconds until it speaks, its message | exit codes of ranks | resumed"
HEAD = f"| fault | {COLUMNS} | largest difference in weights |\n" + "|---" * 6 + "|"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--scratch", type=Path, help="a folder to keep prepared text and undisturbed runs in")
    parser.add_argument("--outputs", type=Path, help="a folder for everything that was printed")
    options = parser.parse_args(words)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(exist_ok=True)
        for name in options.names:
            found = run_case(CASES[name], scratch)
            if options.outputs:
                options.outputs.mkdir(exist_ok=True)
                (options.outputs / f"{name.replace(' ', '-')}.txt").write_text(f"{found}\n{found.outputs}")
            print(row(CASES[name], found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
