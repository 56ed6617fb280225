"""Containers and the SLURM script as far as one machine can check them: they parse, what they name is there, "machines" train.

`srun`, `scontrol` and `hostname` are stand-ins in a folder of their own at the front of PATH: srun starts its command once for each
machine, with SLURM's variables, and passes SIGTERM on, as the real one does.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tuned_runs import settings_file

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "12_grpo" / "cluster" / "train.sbatch"
DOCKERFILES = [CHECKOUT / "Dockerfile", *sorted((CHECKOUT / "docker").glob("*.Dockerfile"))]
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "CMD", "ENV"}
SRUN = """#!/bin/bash
machines=2
echo "$*" | head -1 >> srun_asked
while [[ $1 == --* ]]; do [[ $1 == --nodes=1 ]] && machines=1; shift; done
for ((number = 0; number < machines; number++)); do SLURM_NODEID=$number "$@" & ranks+=($!); done
trap 'kill -TERM "${ranks[@]}"; again=yes' TERM
code=0
for rank in "${ranks[@]}"; do
    while kill -0 "$rank" 2>/dev/null; do wait "$rank" && status=0 || status=$?; done
    ((status)) && code=$status
done
exit $code
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && { echo first; echo second; exit; }
echo "$@" > requeued
"""


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, its words) of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.M))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_names_what_is_there(file):
    assert len(DOCKERFILES) == 3
    found, makefile = instructions(file), (CHECKOUT / "Makefile").read_text()
    names = [name for name, _ in found]
    assert set(names) <= INSTRUCTIONS and names.count("FROM") == 1 and set(names[: names.index("FROM")]) <= {"ARG"}
    for name, words in found:
        if name == "COPY":
            for source in words.split()[:-1]:
                assert (CHECKOUT / source).exists(), f"{source} is not there"
    told = [re.sub(r"[\[\]\",]", " ", words) for name, words in found if name in ("RUN", "CMD")]
    targets = [target for words in told for target in re.findall(r"(?:^|[;&|] )\s*make\s+([a-z-]+)", words)]
    assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    assert {"install", "run"} <= set(targets)
    installed = next(words for words in told if "apt-get" in words)
    assert all(f" {package}" in installed for package in ("make", "git", "g++"))


@pytest.mark.slow
def test_the_steps_of_the_cpu_image_give_a_trainer(tmp_path):
    """All steps of the Dockerfile but apt's, in an empty folder in place of the image: the packages install from the few files that are
    copied before the others, and the default command trains. It asks pip for packages, so it needs an index that has them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHONPATH"))}
    files = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    done = []
    for name, words in instructions(CHECKOUT / "Dockerfile"):
        if name == "COPY":
            *sources, target = words.split()
            for source in sources:
                inside = [file for file in files if source == "." or file == source or file.startswith(f"{source}/")]
                assert inside, source
                for file in inside:
                    place = tmp_path / (target.removesuffix("/") if len(sources) == 1 and file == source else file)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(CHECKOUT / file, place)
        elif (name == "RUN" and "apt-get" not in words) or name == "CMD":
            command = shlex.join(json.loads(words)) if name == "CMD" else words
            if name == "CMD":
                command += ' ARGS="steps=2 data.held_out_rows=8 report.completions=0 engine.evaluate_every=0"'
            ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3000)
            assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
            done.append(command.split()[:2])
    assert done == [["make", "install"], ["touch", ".venv/ready"], ["make", "run"]]
    assert (tmp_path / "runs" / "laptop" / "report.html").is_file()


def test_the_slurm_script_is_bash_and_starts_the_trainer():
    text = SCRIPT.read_text()
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    commands = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert commands and text.index("#SBATCH") < text.index("set -euo"), "sbatch stops reading at the first command"
    assert (CHECKOUT / re.search(r"chapters/\S+\.py", text)[0]).is_file()


@pytest.fixture
def cluster(tmp_path):
    """A checkout's top as two machines see it, and the environment that sbatch gives."""
    (tmp_path / "bin").mkdir()
    for name, source in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", "#!/bin/bash\necho 127.0.0.1\n")):
        (tmp_path / "bin" / name).write_text(source)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    torchrun = tmp_path / ".venv" / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    (tmp_path / "chapters").symlink_to(CHECKOUT / "chapters")
    more = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_ID": os.getpid(), "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": 2}
    more["SLURM_CPUS_PER_TASK"] = 3
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {name: str(value) for name, value in (os.environ | more | {"OMP_NUM_THREADS": 1, "PATH": path}).items()}


def submit(cluster, *words) -> subprocess.Popen:
    log = open(Path(cluster["SLURM_SUBMIT_DIR"]) / "log", "a")
    return subprocess.Popen(["bash", SCRIPT, *map(str, words)], env=cluster, stdout=log, stderr=log)


@pytest.mark.slow
def test_two_machines_train_are_preempted_and_resume(cluster, tmp_path):
    """The signal that SLURM gives before the time is up: a checkpoint, another place in the queue, and the run resumes."""
    file = settings_file(tmp_path, tmp_path / "prepared", steps=120, engine={"output": str(tmp_path / "run"), "log_every": 1})
    words, log, ending = (file, "parallel.data_parallel=2"), tmp_path / "log", time.monotonic() + 240
    job = submit(cluster, *words)
    saved_first = tmp_path / "run" / "checkpoints" / "step-00000002"
    while not saved_first.is_dir() and time.monotonic() < ending and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=240) == 0, log.read_text()
    # Or each machine's ranks would share one core: srun does not take them from sbatch.
    assert "--cpus-per-task=3 bash -c" in (tmp_path / "srun_asked").read_text()
    assert (tmp_path / "requeued").read_text().split() == ["requeue", cluster["SLURM_JOB_ID"]]
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert 2 <= saved < 120
    again = submit(cluster | {"SLURM_RESTART_COUNT": "1"}, *words, "engine.log_every=100")
    assert again.wait(timeout=400) == 0, log.read_text()
    assert "2 ranks, layout dp2" in log.read_text() and f"from step {saved}" in log.read_text()
    assert (tmp_path / "run" / "results.json").is_file()
