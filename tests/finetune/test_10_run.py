"""Chapter 10's run as a reader uses it: small runs over processes, what they leave, and what bad options say."""

import subprocess

import pytest
from command_lines import run_each
from scripts import refused, run_script, told_by

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "10_finetuning" / "run.py"
SMALL = "--base_steps 3 --steps 3 --seq 32 --batch_size 8 --micro_batch_size 2".split()


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def test_two_tensor_parallel_ranks_train_adapters_like_one_process(tmp_path):
    done = start(cwd=tmp_path, fresh=True)
    told = told_by(done, tmp_path)
    held = told["bytes held"]["one process"]
    targets = 2 * 2 * 8 * (2 * 128 + 128 + 64) + 2 * 8 * (128 + 128) + 2 * 2 * 8 * (128 + 384)
    assert "Base: 3 steps on prose" in done.stdout
    assert held["gradients"] < 0.15 * held["weights"] and held["optimizer state"] == 2 * held["gradients"]
    assert told["bytes held"]["rank 0"]["gradients"] < held["gradients"] < 8 * targets


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ["--adapter.base", "nf4"], ["--layout", "fsdp2"], ["--layout", "fsdp2", "--adapter.base", "nf4"], ["--layout", "dp2_zero1"],
    ["--layout", "pp2"], ["--layout", "tp2_sp"], ["--layout", "cp2"], ["--adapter.decomposed", "true"], ["--layout", "one"],
])  # fmt: skip
def test_layouts_train_like_one_process(options, tmp_path):
    told_by(start(*options, cwd=tmp_path), tmp_path)


BAD = [
    (["--adapter.kind", "prompt"], "have no place for virtual tokens"),
    (["--adapter.rank", "0"], "adapter.rank is 0: give at least 1"),
    (["--base_steps", "0"], "base_steps is 0: give at least 1"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in BAD], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_are_refused_in_a_sentence(refusals, options, words):
    assert refused(refusals[*options], words)
