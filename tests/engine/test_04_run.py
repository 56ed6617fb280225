"""Chapter 04's run as a reader uses it: a small one from beginning to end, one that is interrupted and started again, bad options."""

import json
import re
import subprocess

import pytest
from command_lines import run_each
from safetensors.torch import load_file
from scripts import refused, run_script

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "04_runtime_engine" / "run.py"
SMALL = """--steps 12 --seq 16 --batch_size 4 --micro_batch_size 2 --held_out_windows 8 --sample_bytes 20 --prompt the
    --model.hidden_size 16 --model.num_hidden_layers 2 --model.hidden_dropout 0.1 --engine.log_every 4 --engine.evaluate_every 6
    --engine.checkpoint.every 4 --engine.device cpu""".split()


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def weights(folder, step: int) -> dict:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "weights.safetensors")


def test_a_run_leaves_its_checkpoints_its_figures_and_its_plot(tmp_path, text_file):
    done = start("--data", text_file, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "04_runtime_engine"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 6, 8, 12]
    assert {"train/loss", "norm/gradient", "speed/tokens_per_second", "speed/mfu"} <= lines[-1].keys()
    assert (folder / "run.png").stat().st_size > 5000
    for said in ("TransformerModel", "held-out bits per byte", "a sample"):
        assert said in done.stdout
    again = start("--data", text_file, cwd=tmp_path)
    assert again.returncode == 0 and "Going on from step 12" in again.stdout and "held-out bits per byte" in again.stdout
    figure = r"held-out bits per byte │\s+([\d.]+)"
    assert re.search(figure, again.stdout)[1] == re.search(figure, done.stdout)[1]


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, text_file):
    """Asked to leave at its first log; the second start does the rest."""
    more = ["--data", text_file, "--steps", 300, "--engine.output"]
    first = start(*more, tmp_path / "left", cwd=tmp_path, interrupt_after="step")
    assert first.returncode == 0 and re.search(r"Stopped after step \d+ of 300: SIGINT", first.stdout), first.stderr
    left = re.search(r"The same command resumes from step (\d+)", first.stdout)[1]
    second = start(*more, tmp_path / "left", cwd=tmp_path)
    assert second.returncode == 0 and f"Going on from step {left}" in second.stdout
    assert start(*more, tmp_path / "whole", cwd=tmp_path).returncode == 0
    one, other = weights(tmp_path / "left", 300), weights(tmp_path / "whole", 300)
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


BAD = [
    (["--engine.log_every", "0"], "log_every is 0: give at least 1"),
    (["--engine.trackers", "[tensorbord]"], "Did you mean 'tensorboard'"),
    (["--engine.checkpoint.evry", "3"], "checkpoint.every"),
    (["--seq", "256"], "seq is 256 and model.max_position_embeddings only 128"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, text_file):
    """The folder where bad options were given, and what was said to each."""
    folder = tmp_path_factory.mktemp("refusals")
    return folder, run_each(SCRIPT, [options for options, _ in BAD], folder, [*SMALL, "--data", text_file])


@pytest.mark.parametrize(("options", "said"), BAD)
def test_a_bad_option_is_one_sentence_before_any_work(refusals, options, said):
    folder, ended = refusals
    assert refused(ended[*options], said)
    assert not (folder / "runs" / "04_runtime_engine" / "checkpoints").exists()
