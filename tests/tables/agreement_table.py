"""Two machines that were given different things, and the table of what is said: `python tests/tables/agreement_table.py [NAME ...]`.

The trainer runs on two machines that are namespaces (`two_machines`), each with a copy of the project; machine b gets one thing otherwise.
"""

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from trainer_runs import TRAIN, settings_file  # noqa: E402
from two_machines import Job, Machine, Machines  # noqa: E402

from shared.course.errors import CourseError  # noqa: E402
from shared.course.paths import CHECKOUT  # noqa: E402

TIMEOUT = 300
# Run by Python before anything else: what is installed looks like another version.
PRETEND = {
    "torch": """
import importlib.util, sys
path = importlib.util.find_spec("torch").submodule_search_locations[0] + "/version.py"
spec = importlib.util.spec_from_file_location("torch.version", path)
module = sys.modules["torch.version"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.__version__ = "2.9.1"
""",
    "python": "import platform\nplatform.python_version_tuple = lambda: ('3', '10', '7')\n",
    "tokenizers": """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "0.20.3" if name == "tokenizers" else version(name)
""",
}


@dataclass(frozen=True)
class Other:
    """what: differs on machine b. words: of its command. edit: a file of its copy of the project that has one line more. pretend: a key of
    `PRETEND`. names: what the sentence must hold. everywhere: words of both commands."""

    what: str
    names: str
    words: str = ""
    edit: str = ""
    pretend: str = ""
    everywhere: str = ""


ROWS = {
    "rate": Other("learning rate", "optimizer.lr is 0.02 on rank 0 (a) and 0.03 on rank 1 (b)", "optimizer.lr=0.03"),
    "optimizer": Other("optimizer", "optimizer.name is muon on rank 0 (a) and adamw on rank 1 (b)", "optimizer.name=adamw"),
    "seed": Other("seed", "seed is 0 on rank 0 (a) and 1 on rank 1 (b)", "seed=1"),
    "steps": Other("steps", "steps is 6 on rank 0 (a) and 8 on rank 1 (b)", "steps=8"),
    "batch": Other("batch size", "data.batch_size is 4 on rank 0 (a) and 8 on rank 1 (b)", "data.batch_size=8"),
    "micro": Other("micro-batch size", "data.micro_batch_size is 2 on rank 0 (a) and 1 on rank 1 (b)", "data.micro_batch_size=1"),
    "seq": Other("sequence length", "data.seq is 96 on rank 0 (a) and 64 on rank 1 (b)", "data.seq=64"),
    "every": Other("steps between saves", "engine.checkpoint.every is 2 on rank 0 (a) and 3", "engine.checkpoint.every=3"),
    "evaluate": Other("steps between evaluations", "engine.evaluate_every is 3 on rank 0 (a) and 2", "engine.evaluate_every=2"),
    "resume": Other("whether it resumes", "engine.checkpoint.resume is True on rank 0 (a) and False", "engine.checkpoint.resume=false"),
    "precision": Other("precision", "precision is float32 on rank 0 (a) and bfloat16 on rank 1 (b)", "precision=bfloat16"),
    "width": Other("model size", "model.hidden_size is 32 on rank 0 (a) and 64 on rank 1 (b)", "model.hidden_size=64"),
    "clipping": Other("clipping", "max_grad_norm is 1.0 on rank 0 (a) and 0.5 on rank 1 (b)", "max_grad_norm=0.5"),
    "schedule": Other("schedule", "schedule.name is wsd on rank 0 (a) and cosine on rank 1 (b)", "schedule.name=cosine"),
    "layout": Other(
        "layout", "parallel.data_parallel is 2 on rank 0 (a) and 1", "parallel.data_parallel=1 parallel.fully_sharded=2"
    ),
    "backend": Other("who trains in parallel", "parallel.backend is course on rank 0 (a) and torch", "parallel.backend=torch"),
    "output": Other("output folder", "engine.output is", "engine.output=elsewhere"),
    "core": Other("an edit of the core", "files.shared/loss.py is", edit="shared/loss.py"),
    "solution": Other("an edit of a solution", "files.solutions/05_optimizers.py is", edit="solutions/05_optimizers.py"),
    "exercise": Other(
        "an edit of the learner's exercises", "files.chapters/05_optimizers/exercises.py is",
        edit="chapters/05_optimizers/exercises.py", everywhere="impl=mixed",
    ),
    "script": Other("an edit of the script", "files.train.py is", edit="chapters/12_grpo/train.py"),
    "torch": Other("PyTorch's version", "2.9.1 on rank 1 (b)", pretend="torch"),
    "python": Other("Python's version", "3.10 on rank 1 (b)", pretend="python"),
    "tokenizers": Other("the version of a library", "0.20.3 on rank 1 (b)", pretend="tokenizers"),
    "text": Other("text, under the same path", "training.documents is"),
    "tokenizer": Other("tokenizer, under the same path", "tokenizer is", everywhere="data.prepare.tokenizer={folder}/tokenizer"),
    "checkpoint": Other("checkpoints of another run", "no step is the same"),
    "lost": Other("an empty disk, after step 4", "rank 1 has none"),
}  # fmt: skip
OWN_FOLDERS = ("text", "tokenizer", "checkpoint", "lost")  # machines that share none


def said(call) -> str:
    """The sentence with which a rank refuses; empty where it does not."""
    try:
        call()
    except CourseError as error:
        return str(error)
    return ""


@dataclass
class Found:
    """said: by machine, what it printed of the refusal. codes: of the two ranks. seconds: from the start of both, imports included, until
    both had ended. outputs: all that was printed."""

    said: dict[str, str] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    outputs: str = ""


def prepare_machines(machines: list[Machine], scratch: Path) -> Path:
    """The run's settings and a text in each machine's folder. Returns the path of the settings, which is the same on all."""
    folder = machines[0].folder
    sources = [{"path": str(folder / "text"), "suffixes": [".txt"]}]
    source = settings_file(
        scratch / "settings", folder / "prepared",
        data={"prepare": {"sources": sources}}, engine={"output": str(folder / "run")}, parallel={"data_parallel": 2},
    )  # fmt: skip
    for machine in machines:
        shutil.copy(source, machine.kept / "tiny.yaml")
        (machine.kept / "text").mkdir(exist_ok=True)
        for number in range(60):
            lines = [f"Line {number * 40 + line} says that {line * number % 97} is a number." for line in range(40)]
            (machine.kept / "text" / f"{number:03}.txt").write_text("\n".join(lines))
    return folder / "tiny.yaml"


def run_row(name: str, machines: list[Machine], file: Path) -> Found:
    """The same command on all machines, with what the row says otherwise on b."""
    row, (a, b) = ROWS[name], machines
    environment, undo = {}, []
    if row.edit:
        b.run("sh", "-c", f"cp {row.edit} {b.folder}/kept && echo '# edited' >> {row.edit}")
        undo.append(f"cp {b.folder}/kept {row.edit}")
    if row.pretend:
        folder = b.kept / "pretended" / row.pretend
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(PRETEND[row.pretend])
        environment = {"PYTHONPATH": f"{b.folder}/pretended/{row.pretend}:{CHECKOUT}"}
    everywhere = row.everywhere.format(folder=a.folder).split()
    if name in OWN_FOLDERS:
        PREPARED[name](a, b, file)
    found, began = Found(), time.monotonic()
    jobs = start(machines, file, everywhere, row.words.split(), environment)
    found.codes = [job.wait(TIMEOUT) for job in jobs]
    found.seconds = time.monotonic() - began
    for job in jobs:
        found.said[job.machine.name] = sentence_of(job)
        found.outputs += f"--- {job.machine.name}\n{job.output}\n"
    for command in undo:
        b.run("sh", "-c", command)
    return found


def start(
    machines: list[Machine], file: Path, words: list[str], only_b: list[str] = (), environment: dict[str, str] | None = None
) -> list[Job]:
    """A rank of the trainer on each machine, as torchrun would start it, which takes as long again to start itself."""
    place = {"WORLD_SIZE": str(len(machines)), "MASTER_ADDR": machines[0].address, "MASTER_PORT": "29400"}
    jobs = []
    for rank, machine in enumerate(machines):
        mine, own = (only_b, environment or {}) if rank else ([], {})
        jobs.append(machine.start([sys.executable, TRAIN, file, *words, *mine], RANK=str(rank), LOCAL_RANK="0", **place, **own))
    return jobs


def sentence_of(job: Job) -> str:
    """The refusal in a job's output, or all of it."""
    told = [line for _, line in job.lines if "do not agree" in line or "share no folder" in line]
    return told[0] if len(told) == 1 else f"{len(told)} times: {job.output}"


def finished(machines: list[Machine], file: Path, *words: str) -> list[Job]:
    """A run that ends well."""
    jobs = start(machines, file, list(words))
    codes = [job.wait(TIMEOUT) for job in jobs]
    assert codes == [0, 0], "\n".join(job.output for job in jobs)
    return jobs


def other_text(a: Machine, b: Machine, file: Path) -> None:
    for number, animal in enumerate(("whale", "heron", "otter", "adder", "bison")):
        lines = [f"A {animal} was seen {line * 7 % 41} times in the {line}th year, which is a line that a lacks." for line in range(40)]
        (b.kept / "text" / f"more-{number}.txt").write_text("\n".join(lines))


def other_tokenizer(a: Machine, b: Machine, file: Path) -> None:
    """Tokenizers that were trained on each machine, on other text."""
    for machine, text in ((a, "abc abd "), (b, "xyz xyw ")):
        code = (
            "import pathlib; from shared.data.tokenizer import TextTokenizer; "
            f"pathlib.Path('{machine.folder}/tokenizer').mkdir(exist_ok=True); "
            f"TextTokenizer.train(['{text * 50}'] * 9, 300, 2).save_pretrained(pathlib.Path('{machine.folder}/tokenizer'), 96)"
        )
        done = machine.run(sys.executable, "-c", code)
        assert done[0] == 0, done[1]


def other_checkpoint(a: Machine, b: Machine, file: Path) -> None:
    """Both have trained, and b's checkpoints are then those of a run with another rate."""
    finished([a, b], file)
    finished([a, b], file, f"engine.output={a.folder / 'other'}", "optimizer.lr=0.03")
    shutil.rmtree(b.kept / "run" / "checkpoints")
    shutil.copytree(b.kept / "other" / "checkpoints", b.kept / "run" / "checkpoints")


def lost_disk(a: Machine, b: Machine, file: Path) -> None:
    finished([a, b], file)
    shutil.rmtree(b.kept / "run")


PREPARED = {"text": other_text, "tokenizer": other_tokenizer, "checkpoint": other_checkpoint, "lost": lost_disk}


def print_table(names: list[str]) -> None:
    print("| differs on machine b | both machines say | seconds |\n|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as scratch, Machines(Path(scratch) / "m", shared=name not in OWN_FOLDERS) as machines:
            found = run_row(name, machines, prepare_machines(machines, Path(scratch)))
            said = found.said["a"] if found.said["a"] == found.said["b"] else str(found.said)
            print(f"| {ROWS[name].what} | {said} | {found.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ROWS), help=", ".join(ROWS))
    print_table(parser.parse_args().names)
