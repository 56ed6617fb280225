"""Chapter 11's run as a reader uses it: small runs over processes, what they leave, and what bad options say."""

import subprocess

import pytest
from command_lines import run_each
from scripts import refused, run_script, told_by

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "11_preferences" / "run.py"
SMALL = "--base_steps 3 --steps 3 --seq 32 --batch_size 8 --micro_batch_size 2".split()


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def test_two_data_parallel_ranks_learn_preferences_like_one_process(tmp_path):
    done = start(cwd=tmp_path, fresh=True)
    told = told_by(done, tmp_path, learned=False)
    assert "Base: 3 steps on the text" in done.stdout and "bits per pair on 2 ranks" in done.stdout
    assert abs(told["losses"][0] - 1) < 1e-12 and told["losses"][-1] != 1  # the policy is the reference at first: log 2, which is one bit


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ["--layout", "tp2"], ["--layout", "fsdp2"], ["--layout", "dp2_zero1"], ["--layout", "pp2"], ["--layout", "tp2_sp"],
    ["--layout", "fsdp2_tp2"], ["--dpo.loss", "simpo"], ["--dpo.loss", "ipo"], ["--layout", "one"],
])  # fmt: skip
def test_layouts_and_losses_train_like_one_process(options, tmp_path):
    told_by(start(*options, cwd=tmp_path), tmp_path, learned=False)


BAD = [
    (["--dpo.loss", "kto", "--dpo.reference", "beside"], "kto learns from single answers"),
    (["--seq", "15"], "seq is 15, and a row holds two windows"),
    (["--layout", "cp2"], "context parallelism has no preference loss"),
    (["--base_steps", "0"], "base_steps is 0: give at least 1"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in BAD], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_are_refused_in_a_sentence(refusals, options, words):
    assert refused(refusals[*options], words)
