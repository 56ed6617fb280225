"""The trainer on two ranks: the same run as on one, by `make run LAYOUT=...`; another layout resumes, torchrun restarts, Ctrl-C ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from threading import get_ident

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import settings_file, train

from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer.config import TrainerConfig
from shared.trainer.launch import start
from shared.trainer.run import build
from shared.trainer.settings import parse_words

TIMEOUT = 600


def spread(layout: str, *words) -> subprocess.CompletedProcess:
    command, _ = start.command_of(layout, [str(word) for word in words])
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same settings on one process, and on two, whose folder is `run-fsdp2`. Dropout draws on each rank by itself, so there is none."""
    folder = tmp_path_factory.mktemp("layouts")
    file = settings_file(folder, folder / "prepared", model={"hidden_dropout": 0.0, "num_key_value_heads": 2}, report={"completions": 0})
    alone, together = train(file), spread("fsdp2", file)
    assert alone.returncode == 0, alone.stderr
    assert together.returncode == 0, together.stderr
    return folder, file, together.stdout


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert (weight - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.check
def test_two_ranks_train_the_model_of_one(runs):
    folder, _, said = runs
    assert_same(weights(folder / "run-fsdp2"), weights(folder / "run"))
    summary = json.loads((folder / "run-fsdp2" / "results.json").read_text())["summary"]
    alone = json.loads((folder / "run" / "results.json").read_text())["summary"]
    assert summary["held-out bits per byte"] == pytest.approx(alone["held-out bits per byte"], rel=1e-4)
    assert summary["training tokens"] == alone["training tokens"] == 6 * 4 * 96
    differences = {name: value for name, value in summary.items() if "difference" in name}
    assert len(differences) == 3 and all(value < 1e-4 for value in differences.values())
    assert "2 ranks, layout fsdp2, backend course." in said and said.count("The report:") == 1
    assert {"all_gather over fsdp, a step", "reduce_scatter over fsdp, a step"} <= summary.keys()


def test_one_process_resumes_the_checkpoint_of_two_ranks(runs, tmp_path):
    folder, file, _ = runs
    left = shutil.copytree(folder / "run-fsdp2", tmp_path / "left")
    (newest,) = [path for path in (left / "checkpoints").iterdir() if path.name == "step-00000006"]
    shutil.rmtree(newest)
    done = train(file, f"engine.output={left}")
    assert done.returncode == 0 and "Going on from step 4" in done.stdout, done.stderr
    assert_same(weights(left), weights(folder / "run"))


def forget_after(step: int, run):
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_four_ranks_then_two_on_torchs_engine_then_one_end_as_one_process(runs):
    folder, file, _ = runs
    words = [file, f"engine.output={folder / 'handed-on'}", "engine.checkpoint.keep_last=9"]
    first = spread("dp2_fsdp2", *words)
    assert first.returncode == 0, first.stderr
    forget_after(2, folder / "handed-on")
    second = spread("fsdp2", *words, "parallel.backend=torch")
    assert second.returncode == 0 and "Going on from step 2" in second.stdout, second.stderr
    forget_after(4, folder / "handed-on")
    third = train(*words)
    assert third.returncode == 0 and "Going on from step 4" in third.stdout, third.stderr
    assert_same(weights(folder / "handed-on"), weights(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "fsdp2", "tp2"])
def test_torchs_engine_trains_the_model_of_one_process(runs, layout):
    folder, file, _ = runs
    done = spread(layout, file, "parallel.backend=torch")
    assert done.returncode == 0 and f"layout {layout}, backend torch." in done.stdout, done.stderr
    assert_same(weights(folder / f"run-{layout}-torch"), weights(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_the_report_shows_what_tensor_parallelism_sends_and_should_send(runs, layout):
    folder, file, _ = runs
    done = spread(layout, file)
    assert done.returncode == 0, done.stderr
    assert_same(weights(folder / f"run-{layout}"), weights(folder / "run"))
    summary = json.loads((folder / f"run-{layout}" / "results.json").read_text())["summary"]
    predicted = {name.removesuffix(", by formula"): value for name, value in summary.items() if name.endswith(", by formula")}
    measured = {name.removesuffix(", a step"): value for name, value in summary.items() if name.endswith("over tp, a step")}
    assert predicted == measured and "all_reduce over tp" in measured


@pytest.mark.slow
@pytest.mark.parametrize("layout, ranks", [("cp2", 2), ("dp2_cp2", 4)])
def test_ranks_that_share_the_sequence_train_the_model_of_one_process(runs, layout, ranks):
    folder, file, _ = runs
    done = spread(layout, file)
    assert done.returncode == 0 and f"{ranks} ranks, layout {layout}, backend course." in done.stdout, done.stderr
    assert_same(weights(folder / f"run-{layout}"), weights(folder / "run"))
    summary, alone = (json.loads((folder / name / "results.json").read_text())["summary"] for name in (f"run-{layout}", "run"))
    assert summary["held-out bits per byte"] == pytest.approx(alone["held-out bits per byte"], rel=1e-4)
    assert summary["held-out next tokens guessed right"] == pytest.approx(alone["held-out next tokens guessed right"], abs=1e-3)
    assert summary["training tokens"] == alone["training tokens"]
    assert {"send over cp, a step", "receive over cp, a step", "all_reduce over loss, a step"} <= summary.keys()


@pytest.mark.slow
@pytest.mark.parametrize("layout, seeds", [("cp2", [0, 1]), ("dp2_cp2", [0, 1, 2, 3]), ("cp2_tp2", [0, 0, 1, 1])])
def test_ranks_with_other_rows_or_positions_draw_other_dropout(runs, tmp_path, monkeypatch, layout, seeds):
    _, file, _ = runs
    told, inner = {}, torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (told.setdefault(get_ident(), seed), inner(seed))[1])

    def work(world):
        config = parse_words(TrainerConfig, [str(file), f"engine.output={tmp_path / str(world.rank)}"])
        build(replace(config, parallel=parse_layout(layout)), Console(quiet=True), world)
        return told[get_ident()]

    assert run_threads(work, len(seeds)) == seeds


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_it_ends_as_one_process(runs):
    """Rank 1 is killed as soon as step 2 is saved; a step takes longer than finding that out, since a rank compares replicas in each."""
    folder, file, _ = runs
    words = [str(file), f"engine.output={folder / 'killed'}", "engine.log_every=1", "parallel.heartbeat_timeout=5"]
    command, _ = start.command_of("dp2", words)
    command.insert(command.index("--standalone"), "--max-restarts=1")
    rest = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    run = subprocess.Popen(command, **rest)
    saved = folder / "killed" / "checkpoints" / "step-00000002"
    deadline = time.monotonic() + TIMEOUT
    while not saved.exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(run.pid).children() if "train.py" in " ".join(child.cmdline())]
    ranks[-1].kill()
    said, _ = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 0 and "Going on from step" in said, said
    assert_same(weights(folder / "killed"), weights(folder / "run"))


@pytest.mark.slow
def test_ctrl_c_of_two_ranks_shows_no_lines_of_torchrun_and_the_same_command_goes_on(tmp_path):
    file = settings_file(tmp_path, tmp_path / "prepared", engine={"log_every": 1, "evaluate_every": 0}, report={"completions": 0})
    words = [sys.executable, "-m", "shared.trainer.launch.start", "dp2", str(file), "steps=100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    running = subprocess.Popen(words, start_new_session=True, **pipes)
    while "step" not in running.stdout.readline().split():
        assert running.poll() is None
    second = subprocess.run(words, **pipes, timeout=TIMEOUT)
    assert second.returncode == 1 and "run-dp2 is in use by process" in second.stderr and "(job " in second.stderr
    assert second.stderr.count("is in use by") == 1 and "Traceback" not in second.stderr, second.stderr
    os.killpg(running.pid, signal.SIGINT)
    said, errors = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 130 and "The same command resumes from step" in said and not errors.strip(), errors
