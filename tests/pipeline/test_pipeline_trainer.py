"""The trainer under pipeline parallelism, in processes: `make run LAYOUT=pp2` trains the model of one process, and resumes on it."""

import json
import os
import shutil
import subprocess

import pytest
from safetensors.torch import load_file
from trainer_runs import settings_file, train

from shared.trainer.launch import start

MODEL = {"hidden_dropout": 0.0, "num_key_value_heads": 2, "num_hidden_layers": 4, "tie_word_embeddings": True}
WORDS = {"pp2": [], "pp2_zero_bubble": ["parallel.pipeline_schedule=zero_bubble"],
         "pp2_interleaved": ["parallel.pipeline_schedule=interleaved", "parallel.pipeline_chunks=2"]}  # fmt: skip
BUBBLES = {"pp2": 1 / 4, "pp2_zero_bubble": 1 / 12, "pp2_interleaved": 1 / 8}  # four micro-batches


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    file = settings_file(folder, folder / "prepared", model=MODEL, data={"batch_size": 8}, report={"completions": 0})
    done = train(file)
    assert done.returncode == 0, done.stderr
    return folder, file


def spread(layout: str, *words) -> subprocess.CompletedProcess:
    command, _ = start.command_of(layout, [str(word) for word in words])
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)


def assert_same(mine, theirs):
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (mine, theirs))
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert (weight - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("case", WORDS)
def test_two_stages_train_the_model_of_one_process(alone, case):
    folder, file = alone
    done = spread("pp2", file, f"engine.output={folder / case}", *WORDS[case])
    assert done.returncode == 0 and "2 ranks, layout pp2, backend course. Stages have blocks" in done.stdout, done.stderr
    assert "4 micro-batches in a step: ranks wait" in done.stdout
    assert_same(folder / case, folder / "run")
    mine, theirs = (json.loads((folder / name / "results.json").read_text())["summary"] for name in (case, "run"))
    assert mine["held-out bits per byte"] == pytest.approx(theirs["held-out bits per byte"], rel=1e-4)
    by_formula = {name.removesuffix(", by formula"): value for name, value in mine.items() if name.endswith(", by formula")}
    assert {"send over pp", "receive over pp_gradients", "all_reduce over pp_ends", "broadcast over pp"} <= by_formula.keys()
    assert by_formula == {name: mine[f"{name}, a step"] for name in by_formula}
    assert [value for name, value in mine.items() if name.startswith("bubble of")] == pytest.approx([BUBBLES[case]])


@pytest.mark.slow
def test_one_process_resumes_the_checkpoint_of_two_stages(alone, tmp_path):
    folder, file = alone
    done = spread("pp2", file, f"engine.output={tmp_path / 'left'}")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "left" / "checkpoints" / "step-00000006")
    done = train(file, f"engine.output={tmp_path / 'left'}")
    assert done.returncode == 0 and "Going on from step 4" in done.stdout, done.stderr
    assert_same(tmp_path / "left", folder / "run")
