"""Each slice is started on the CPU at small size, so that the script itself is not what fails on a GPU. Nothing is measured, and no claim
about a GPU counts as held."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import run as command
from gpu_machine import Machine
from gpu_rows import NO_GPU
from slices import SLICES, environment_of, sentence_of


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_runs_to_its_end_without_a_gpu(name, monkeypatch):
    for variable, value in environment_of(name).items():
        monkeypatch.setenv(variable, value)
    rows = [row.as_json(on_gpu=False) for row in importlib.import_module(f"slices.{name}").run(Machine("cpu"), small=True)]
    assert rows and [row for row in rows if row["state"] != NO_GPU] == []
    json.dumps(rows)


def test_every_slice_says_what_it_shows(capsys, tmp_path):
    assert all(sentence_of(name).endswith(".") for name in SLICES)
    assert command.main(["--list", "--output", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in SLICES) and "missing: none" in listed


def test_the_command_runs_a_slice_in_a_process_of_its_own_and_resumes(capsys, tmp_path):
    words = ["--device", "cpu", "--size", "small", "--slice", "muon", "--output", str(tmp_path)]
    assert command.main(words) == 0 and "running" in capsys.readouterr().out
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["muon"]
    assert record["state"] == "started" and {row["state"] for row in record["rows"]} == {NO_GPU}
    assert "Newton-Schulz" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert command.main(words) == 0 and "running" not in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(capsys, tmp_path):
    if Machine("cpu") and command.gpu_runner.gpu_is_there():
        pytest.skip("there is a GPU here")
    assert command.main(["--output", str(tmp_path)]) == 2 and "--device cpu" in capsys.readouterr().err


@pytest.mark.slow  # starts torchrun
def test_two_ranks_start_over_gloo():
    rows = list(importlib.import_module("slices.nccl").two_ranks("cpu"))
    assert len(rows) == 9 and all(row.holds for row in rows), rows


OTHERS = (  # packages of the course that are not among the needed ones
    "transformers tensorboard mlflow wandb datasets click nbformat nbclient jupyterlab IPython pytest datasketch py3langid lion_pytorch "
    "tiktoken sqlalchemy alembic einops"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_needs_the_named_packages_alone(name):
    """With every other package of the course out of reach, as `find_spec` and `import` see it."""
    program = f"""
import importlib.abc, importlib.util, sys
sys.path[:0] = [{str(command.FOLDER)!r}, {str(command.FOLDER.parents[1])!r}]
hidden = set({OTHERS!r}.split())
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
seen, importlib.util.find_spec = importlib.util.find_spec, lambda name, package=None: None if name in hidden else seen(name, package)
from gpu_machine import Machine
from gpu_rows import NO_GPU
rows = list(importlib.import_module("slices.{name}").run(Machine("cpu"), True))
assert rows and all(row.state(False) == NO_GPU for row in rows), rows
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment_of(name))
    assert ended.returncode == 0, ended.stderr[-2000:]
