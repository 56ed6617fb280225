"""Chapter 09's run as a reader uses it: small runs over processes, what they leave, and what bad options say."""

import json
import re
import subprocess

import pytest
import torch
from command_lines import run_each
from scripts import refused, run_script, told_by
from workspace import write_solutions

from chapters.expert_watch import added, exchanging_ranks
from shared.course import catalogue
from shared.course.paths import CHECKOUT
from shared.parallel.config import ParallelConfig

SCRIPT = CHECKOUT / "chapters" / "09_mixture_of_experts" / "run.py"
SMALL = "--steps 3 --seq 32 --batch_size 8 --micro_batch_size 2 --model.hidden_size 32".split()
TOKENS = 3 * 8 * 32


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def test_two_ranks_with_half_of_the_experts_each_train_like_one(tmp_path):
    done = start(cwd=tmp_path, fresh=True)
    told = told_by(done, tmp_path)
    held, experts = told["bytes held"], told["experts"]
    expert_bytes = 8 * 2 * 8 * 3 * 64 * 32  # two blocks have experts: 8 of three matrices each
    assert told["layout"] == "dp2_ep2" and held["rank 0"]["weights"] == held["one process"]["weights"] - expert_bytes / 2
    assert experts["loads of one process are the same"] and list(experts["loads"]) == ["1", "2"]
    loads = torch.tensor(list(experts["loads"].values()))
    assert loads.shape == (2, 3, 8) and loads.sum(dim=(1, 2)).tolist() == [2 * TOKENS] * 2
    exchanges = experts["all-to-alls of rank 0"]
    assert exchanges["formula"] == pytest.approx(exchanges["counted"], rel=1e-12) and exchanges["counted"]["calls"] == 3 * 2 * 2 * 5
    fullest = max(loads[..., :4].sum(), loads[..., 4:].sum()) / (loads.sum() / 2)
    assert experts["rows of the fullest rank over the mean"] == pytest.approx(fullest.item())
    assert 0.4 < experts["rows that travelled"] < 0.6 and "of the rows travelled to another rank; 50.0% would" in done.stdout
    for name in ("figures.png", "loads.png"):
        assert (tmp_path / "runs/09_mixture_of_experts" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ["--layout", "one"], ["--layout", "dp4_ep2"], ["--layout", "dp4_ep4"], ["--layout", "fsdp2_ep2"], ["--layout", "dp2_tp2_ep2"],
    ["--layout", "pp2_dp2_ep2"], ["--layout", "cp2"], ["--layout", "dp2_cp2_ep2"], ["--parallel.activation_checkpointing", "full"],
    ["--parallel.backend", "torch"],
])  # fmt: skip
def test_layouts_train_like_one_process(options, tmp_path):
    experts = told_by(start(*options, "--batch_size", "8", cwd=tmp_path), tmp_path)["experts"]
    assert experts["loads of one process are the same"]
    if exchanges := experts.get("all-to-alls of rank 0"):
        assert options[1] == "torch" or exchanges["formula"] == pytest.approx(exchanges["counted"], rel=1e-12)


def test_loads_are_added_by_block_over_ranks_that_saw_other_tokens():
    first, second, third = {"1": [[1, 2], [3, 0]]}, {"1": [[0, 1], [1, 1]]}, {"10": [[5, 5], [5, 5]]}
    assert added([third, first, second]) == {"1": [[1, 3], [4, 1]], "10": [[5, 5], [5, 5]]}
    layout = ParallelConfig(data_parallel=4, tensor_parallel=2, expert_parallel=2)
    assert exchanging_ranks(layout, 4) == [0, 2]


WRONG = [
    (["--layout", "dp3_ep3", "--batch_size", "6"], "does not divide model.experts.num_experts 8"),
    (["--layout", "tp3"], "does not divide num_attention_heads 4"),
    (["--model.experts.first_k_dense", "3"], "model.experts.first_k_dense is 3 of 3 blocks, so none has experts"),
    (["--model.experts.bias_update_rate", "0.01"], "here nothing moves the bias"),
    (["--layout", "dp2_xp2"], "not understood at 'xp2'"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in WRONG], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_wrong_option_is_one_sentence_before_anything_starts(refusals, options, said):
    done = refusals[*options]
    assert refused(done, said) and done.returncode == 1 and "processes" not in done.stdout


def test_a_learners_own_exchange_runs_and_a_wrong_one_shows_in_the_difference(tmp_path):
    write_solutions(tmp_path)
    mine = catalogue.find_chapter("09").stub_file(tmp_path)
    right, way_back = mine.read_text(encoding="utf-8"), "return exchanged(upstream, received, sent)"
    assert right.count(way_back) == 1
    mine.write_text(right.replace(way_back, f"{way_back} / group.size"), encoding="utf-8")
    done = start("--impl", "mine", cwd=tmp_path)
    assert done.returncode == 0 and re.search(r"(\d+) of \1 parts are yours", done.stdout), done.stderr
    told = json.loads((tmp_path / "runs/09_mixture_of_experts/figures.json").read_text())
    assert told["largest difference"]["last gradients"] > 0.01
