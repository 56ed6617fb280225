"""Every tracker, run by the trainer itself and read back with its own reader: each optimizer, on one process and on two, and resumed."""

import os
import subprocess
import sys
import time
import urllib.request
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from tracker_readers import in_32_bits, mlflow_metrics, tensorboard_metrics, wandb_parts
from trainer_runs import settings_file

from shared.engine.trackers import TRACKERS
from shared.engine.trackers.jsonl import read_jsonl
from shared.optim.config import OptimizerConfig
from shared.trainer.config import TrainerConfig
from shared.trainer.launch import start
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

OPTIMIZERS = get_args(get_args(OptimizerConfig.__dataclass_fields__["name"].type)[0])  # the named ones, of a union with import paths
ALL = f"engine.trackers=[{', '.join(TRACKERS)}]"


def settings(folder: Path, prepared: Path, optimizer: str) -> Path:
    report = {"completions": 0, "new_tokens": 1, "export": False}
    engine = {"checkpoint": {"every": 2, "keep_best": False}}
    return settings_file(folder, prepared, report=report, optimizer={"name": optimizer, "lr": 0.002}, engine=engine, steps=4)


def trained(file: Path, *words: str) -> str:
    """What the trainer prints, run in this process."""
    console = Console(file=StringIO(), width=300)
    train_model(parse_words(TrainerConfig, [str(file), ALL, *words]), console)
    return console.file.getvalue()


def cut_back(file: Path) -> None:
    """As if the run had been killed at its step 3: its checkpoint is that of step 2."""
    last = file.parent / "run" / "checkpoints" / "step-00000004"
    last.rename(file.parent / "step-4")


def assert_each_holds(run: Path, steps: list[int], parts: int = 1) -> None:
    """The lines of `metrics.jsonl` are those steps, and every tracker has just these; W&B in `parts` parts of one run."""
    expected = read_jsonl(run / "metrics.jsonl")
    assert list(expected) == steps
    assert tensorboard_metrics(run)[0] == in_32_bits(expected)
    found, stored = mlflow_metrics(run)
    assert found.keys() == expected.keys() and stored.info.status == "FINISHED"
    assert stored.data.params["optimizer.name"] and stored.data.params["engine.log_every"] == "2"
    of_wandb = wandb_parts(run)
    assert len(of_wandb) == parts and len({run_id for run_id, _ in of_wandb}) == 1
    together: dict = {}
    for _, some in of_wandb:
        assert not together.keys() & some.keys()
        together |= some
    assert together == found  # both keep a step's first values; the files hold the resumed run's, with its own seconds
    repeated = {"speed", "memory", "cpu"} if parts > 1 else set()
    for step, metrics in expected.items():
        assert metrics.keys() == found[step].keys()
        measured_anew = {name for name, value in metrics.items() if found[step][name] != value}
        assert {name.split("/")[0] for name in measured_anew} <= repeated


def test_each_tracker_keeps_a_run_with_muon_that_was_resumed(tmp_path, prepared):
    file = settings(tmp_path, prepared, "muon")
    said = trained(file)
    cut_back(file)
    said += trained(file)
    assert "set aside" not in said and "Going on from step 2" in said
    assert_each_holds(tmp_path / "run", [1, 2, 3, 4], parts=2)
    names = {name for name in read_jsonl(tmp_path / "run" / "metrics.jsonl")[4] if name.startswith("learning_rate")}
    assert names == {"learning_rate/muon", "learning_rate/adamw", "learning_rate/adamw_no_decay"}
    assert f"tensorboard --logdir {tmp_path}/run/tensorboard" in said
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/run/mlflow.db" in said
    assert f"wandb sync {tmp_path}/run/wandb/offline-run-*-{wandb_parts(tmp_path / 'run')[0][0]}" in said


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2"])
def test_each_tracker_keeps_a_run_of_each_optimizer_and_layout(layout, optimizer, tmp_path, prepared):
    file = settings(tmp_path, prepared, optimizer)
    command, _ = start.command_of(layout, [str(file), ALL, f"engine.output={tmp_path / 'run'}"])
    for going_on in (False, True):
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and "set aside" not in done.stdout + done.stderr, done.stderr
        assert ("Going on from step 2" in done.stdout) == going_on
        if not going_on:
            assert_each_holds(tmp_path / "run", [1, 2, 3, 4])
            cut_back(file)
    assert_each_holds(tmp_path / "run", [1, 2, 3, 4], parts=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_trackers_that_fail_end_no_run_on_two_ranks(layout, tmp_path, prepared):
    file, run = settings(tmp_path, prepared, "muon"), tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").write_text("no folder")
    (run / "wandb").write_text("no folder")
    words = [str(file), ALL, f"engine.output={run}", "engine.mlflow_uri=http://127.0.0.1:9"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    command, _ = start.command_of(layout, words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "The report:" in done.stdout, done.stderr
    assert [done.stdout.count(f"{name} failed") for name in ("MlflowTracker", "TensorBoardTracker")] == [1, 1]
    assert list(read_jsonl(run / "metrics.jsonl")) == [1, 2, 3, 4]


@pytest.mark.slow
def test_tensorboards_page_shows_the_curves(tmp_path, prepared):
    """Its default reader leaves out values of 64 bits, without a word."""
    trained(settings(tmp_path, prepared, "sgd"), "engine.trackers=[tensorboard]")
    program = Path(sys.executable).with_name("tensorboard")
    words = [program, "--inspect", "--logdir", tmp_path / "run" / "tensorboard"]
    inspected = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert inspected.returncode == 0 and "train/loss" in inspected.stdout
    words = ["--logdir", tmp_path / "run" / "tensorboard", "--port", "0"]
    page = subprocess.Popen([program, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        address = next(line.split(" at ")[1].split()[0] for line in page.stderr if " at http" in line)
        deadline, tags = time.monotonic() + 120, ""
        while "train/loss" not in tags and time.monotonic() < deadline:
            time.sleep(1)
            tags = urllib.request.urlopen(f"{address}data/plugin/scalars/tags", timeout=60).read().decode()
        assert '"train/loss"' in tags
    finally:
        page.terminate()
        page.wait(60)
