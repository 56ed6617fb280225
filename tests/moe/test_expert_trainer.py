"""The trainer with experts over ranks: `make run LAYOUT=dp2_ep2` trains the model of one process, and one process resumes it."""

import json
import os
import shutil
import subprocess

import pytest
from safetensors.torch import load_file
from trainer_runs import settings_file, train

from shared.trainer import start

EXPERTS = {
    "num_experts": 4, "moe_intermediate_size": 24, "scoring": "sigmoid", "bias_update_rate": 0.01, "num_shared_experts": 1,
    "first_k_dense": 1, "z_coefficient": 0.001,
}  # fmt: skip


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def require_same(folder, expected):
    mine, theirs = weights(folder), weights(expected)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert (weight - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.slow
def test_ranks_train_the_model_of_one_process_and_it_resumes_them(tmp_path):
    model = {"experts": EXPERTS, "qk_norm": True, "hidden_dropout": 0.0}
    file = settings_file(tmp_path, tmp_path / "prepared", model=model, report={"completions": 0})
    alone = train(file)
    assert alone.returncode == 0, alone.stderr
    for layout in ("dp2_ep2", "fsdp2_ep2"):
        command, _ = start.command_of(layout, [str(file)])
        together = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
        assert together.returncode == 0, together.stderr
        folder = tmp_path / f"run-{layout}"
        require_same(folder, tmp_path / "run")
        lines = [[json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()] for each in (folder, tmp_path / "run")]
        for here, there in zip(*lines, strict=True):
            assert {name: here[name] for name in here if name.startswith("experts/")} == pytest.approx(
                {name: there[name] for name in there if name.startswith("experts/")}
            )
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    done = train(file, f"engine.output={folder}")
    assert done.returncode == 0 and "Going on from step 4" in done.stdout, done.stderr
    require_same(folder, tmp_path / "run")
