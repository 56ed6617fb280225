"""The trainer on products of layouts, as its user starts it: killed in the middle and restarted by torchrun, clipped, evaluated, reported
and exported, with experts, it ends as one process does."""

import json
import os
import subprocess
import time

import psutil
import pytest
from safetensors.torch import load_file
from trainer_runs import settings_file, train

from shared.trainer.launch import start

TIMEOUT = 600
LAYOUTS = ("pp2_tp2", "fsdp2_tp2", "dp2_tp2_zero1", "fsdp2_ep2", "pp2_dp2_ep2", "pp2_fsdp2_tp2")
EXPERTS = {
    "num_experts": 4, "moe_intermediate_size": 24, "scoring": "sigmoid", "bias_update_rate": 0.01, "num_shared_experts": 1,
    "first_k_dense": 1, "z_coefficient": 0.001,
}  # fmt: skip
MODEL = {"experts": EXPERTS, "qk_norm": True, "hidden_dropout": 0.0, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("products")
    made = {"model": MODEL, "data": {"batch_size": 8}, "engine": {"log_every": 1}, "report": {"completions": 0}}
    file = settings_file(folder, folder / "prepared", **made, max_grad_norm=0.5)
    done = train(file)
    assert done.returncode == 0, done.stderr
    return folder, file


def started(layout: str, *words, restarts: int = 0) -> subprocess.Popen:
    command, _ = start.command_of(layout, [str(word) for word in words])
    if restarts:
        command.insert(command.index("--standalone"), f"--max-restarts={restarts}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def kill_last_rank(run: subprocess.Popen, folder) -> None:
    """Once the second step is saved."""
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "checkpoints" / "step-00000002").exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.01)
    [child for child in psutil.Process(run.pid).children() if "train.py" in " ".join(child.cmdline())][-1].kill()


def require_same(found, one) -> None:
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (found, one))
    assert mine.keys() == theirs.keys()
    far = {name: float((weight - theirs[name]).norm() / theirs[name].norm()) for name, weight in mine.items() if theirs[name].any()}
    assert max(far.values()) <= 1e-4, sorted(far.items(), key=lambda each: -each[1])[:5]
    mine, theirs = (json.loads((folder / "results.json").read_text())["summary"] for folder in (found, one))
    assert mine["held-out bits per byte"] == pytest.approx(theirs["held-out bits per byte"], rel=1e-4)
    assert mine["training tokens"] == theirs["training tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_is_restarted_and_ends_as_one_process(alone, layout):
    folder, file = alone
    run = started(layout, file, f"engine.output={folder / layout}", "parallel.heartbeat_timeout=10", restarts=1)
    kill_last_rank(run, folder / layout)
    said, _ = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 0 and "Going on from step" in said, said
    require_same(folder / layout, folder / "run")
    assert (folder / layout / "report.html").stat().st_size > 1000


DENSE = ["model.experts=null"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [("pp2_tp2", DENSE), ("fsdp2_tp2", DENSE), ("dp2_tp2_zero1", DENSE), ("fsdp2_ep2", []), ("pp2_dp2_ep2", []), ("pp2_fsdp2_tp2", [])],
)
def test_compiled_products_train_the_model_of_one_process(alone, layout, model, tmp_path):
    """A dense model's blocks are compiled whole; of blocks with experts, what lies around them."""
    words = [alone[1], "engine.compile=true", *model]
    done = train(*words[:1], *model, f"engine.output={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    run = started(layout, *words, f"engine.output={tmp_path / layout}")
    said, _ = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 0, said
    require_same(tmp_path / layout, tmp_path / "run")
