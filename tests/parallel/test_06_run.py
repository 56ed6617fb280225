"""Chapter 06's run as a reader uses it: one small run over processes, what it leaves, and what bad options say."""

import json
import subprocess

import pytest
from command_lines import run_each
from scripts import refused, run_script

from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "06_data_parallel" / "run.py"
SMALL = "--steps 3 --seq 32 --batch_size 4 --micro_batch_size 1 --model.hidden_size 32 --model.num_hidden_layers 2".split()


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def test_two_ranks_train_like_one_and_say_what_they_sent_and_held(tmp_path):
    done = start("--layout", "dp2_zero1", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "runs/06_data_parallel/figures.json").read_text())
    assert told["layout"] == "dp2_zero1" and len(told["losses"]) == 3 and told["losses"][-1] < told["losses"][0]
    assert max(told["largest difference"].values()) < 1e-9
    assert {name.split()[0] for name in told["traffic of rank 0"]} == {"reduce_scatter", "all_gather", "all_reduce"}
    held = told["bytes held"]
    assert held["rank 0"]["weights"] == held["one process"]["weights"]
    assert held["rank 0"]["optimizer state"] == pytest.approx(held["one process"]["optimizer state"] / 2, rel=0.001)
    assert (tmp_path / "runs/06_data_parallel/figures.png").read_bytes().startswith(b"\x89PNG")


WRONG = [
    (["--layout", "dp2_zeroo1"], "not understood at 'zeroo1'"),
    (["--layout", "tp2"], "comes with chapter 07"),
    (["--micro_batch_size", "3"], "cannot share it out"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in WRONG], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_wrong_option_is_one_sentence_before_anything_starts(refusals, options, said):
    done = refusals[*options]
    assert refused(done, said) and done.returncode == 1
