"""The trainer with experts over ranks: `make run LAYOUT=dp2_ep2` trains the model of one process, and one process resumes it."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import settings_file, train

from shared.parallel.comm.threads import run_threads
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.trainer.config import TrainerConfig
from shared.trainer.launch import start
from shared.trainer.models import RUN_AXES, plain_model
from shared.trainer.settings import parse_words

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


def test_no_rank_needs_room_for_all_experts(tmp_path):
    """The model is built without memory, and each rank allocates what it has of it."""
    file = settings_file(tmp_path, tmp_path / "prepared", model={"experts": EXPERTS}, parallel={"data_parallel": 2, "expert_parallel": 2})
    config = parse_words(TrainerConfig, [str(file)])

    def work(world):
        mesh = Mesh(config.parallel, world)
        model = plain_model(config, mesh, torch.device("cpu"))
        is_meta = next(model.parameters()).is_meta
        strategy = apply_parallel(model, mesh, axes=RUN_AXES)
        return is_meta, strategy.module.stack.blocks["1"].feed_forward.experts.up_proj.weight.untyped_storage().nbytes()

    assert run_threads(work, 2) == [(True, 2 * 24 * 32 * 4)] * 2


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
