"""Chapter 07's run as a reader uses it: small runs over processes, what they leave, and what bad options say."""

import json
import re
import subprocess

import pytest
from command_lines import run_each
from scripts import refused, run_script, told_by
from workspace import write_solutions

from shared.course import catalogue
from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "07_tensor_parallel" / "run.py"
SMALL = "--steps 3 --seq 32 --batch_size 4 --micro_batch_size 1 --model.hidden_size 32 --model.num_hidden_layers 2".split()


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def test_two_ranks_with_half_of_the_matrices_each_train_like_one(tmp_path):
    told = told_by(start(cwd=tmp_path, fresh=True), tmp_path)
    held = told["bytes held"]
    assert told["layout"] == "tp2" and held["rank 0"]["weights"] == pytest.approx(held["one process"]["weights"] / 2, rel=0.02)
    assert held["rank 1"]["optimizer state"] == pytest.approx(held["one process"]["optimizer state"] / 2, rel=0.02)
    assert {name for name, counted in told["traffic of rank 0"].items() if counted["calls"] > 3} == {"all_reduce tp"}
    assert (tmp_path / "runs/07_tensor_parallel/figures.png").read_bytes().startswith(b"\x89PNG")


SHARED_OUT = {"tp2_sp": {"all_gather tp", "reduce_scatter tp"}, "cp2": {"send cp", "receive cp"}}


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory):
    """The figures of a run in each layout that shares sequences out."""
    folder = tmp_path_factory.mktemp("shared_out")
    lines = [["--layout", layout, "--output", f"{layout}/runs/{SCRIPT.parent.name}"] for layout in SHARED_OUT]
    return {line[1]: told_by(done, folder / line[1]) for line, done in run_each(SCRIPT, lines, folder, SMALL).items()}


@pytest.mark.parametrize("layout", SHARED_OUT)
def test_sequences_shared_out_train_like_one_process(shared_out, layout):
    assert SHARED_OUT[layout] <= shared_out[layout]["traffic of rank 0"].keys()


WRONG = [
    (["--layout", "tp3"], "does not divide num_attention_heads 4"),
    (["--layout", "tp2_sq"], "not understood at 'sq'"),
    (["--layout", "cp3"], "seq has 32 positions"),
    (["--seq", "31", "--layout", "tp2_sp"], "31 positions do not divide"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in WRONG], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_wrong_option_is_one_sentence_before_anything_starts(refusals, options, said):
    done = refusals[*options]
    assert refused(done, said) and done.returncode == 1


def test_a_learners_own_parts_train_the_model_and_a_wrong_one_shows(tmp_path):
    write_solutions(tmp_path)
    done = start("--impl", "mine", "--layout", "tp2_sp", cwd=tmp_path)
    told_by(done, tmp_path)
    assert re.search(r"(\d+) of \1 parts are yours", done.stdout)

    mine = catalogue.find_chapter("07").stub_file(tmp_path)
    right = mine.read_text(encoding="utf-8")
    mine.write_text(
        right.replace("elif sequence_parallel and (of_stream or row_bias)", "elif sequence_parallel and row_bias"), encoding="utf-8"
    )
    assert mine.read_text(encoding="utf-8") != right
    done = start("--impl", "mine", "--layout", "tp2_sp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/07_tensor_parallel/figures.json").read_text())["largest difference"]["last gradients"] > 1e-3
