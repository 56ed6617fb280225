"""Chapter 08's run as a reader uses it: small runs over processes, what they leave, and what bad options say."""

import re
import subprocess

import pytest
from command_lines import run_each
from scripts import refused, run_script, told_by
from workspace import write_solutions

from shared.course import catalogue
from shared.course.paths import CHECKOUT

SCRIPT = CHECKOUT / "chapters" / "08_pipeline_parallel" / "run.py"
SMALL = "--steps 3 --seq 32 --batch_size 8 --micro_batch_size 2 --model.hidden_size 32".split()
SCHEDULE, CHUNKS = "--parallel.pipeline_schedule", "--parallel.pipeline_chunks"


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def kept(told: dict) -> list[int]:
    return [rank["graphs"] for rank in told["pipeline"]["ranks"]]


def test_two_ranks_with_half_of_the_layers_each_train_like_one(tmp_path):
    done = start(cwd=tmp_path, fresh=True)
    told = told_by(done, tmp_path)
    held, pipeline = told["bytes held"], told["pipeline"]
    assert told["layout"] == "pp2" and held["rank 0"]["weights"] == pytest.approx(held["one process"]["weights"] / 2, rel=0.02)
    assert held["rank 0"]["weights"] + held["rank 1"]["weights"] == held["one process"]["weights"]
    assert {name: counted["calls"] for name, counted in told["traffic of rank 0"].items() if "pp" in name} == {
        "send pp": 12, "receive pp_gradients": 12, "broadcast pp": 3,
    }  # fmt: skip
    assert kept(told) == [2, 1] and list(pipeline["bubbles"].values())[:2] == pytest.approx([1 / 4, 1 / 4])
    assert pipeline["ranks"][0]["activations"] > 1.5 * pipeline["ranks"][1]["activations"] > 0
    actions = [[f"{kind}{number}" for kind, number, *_ in rank["actions"]] for rank in pipeline["ranks"]]
    assert actions == [["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"], ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]]
    begun = {(rank, *action[:2]): action[3] for rank, each in enumerate(pipeline["ranks"]) for action in each["actions"]}
    assert all(begun[0, "F", each] < begun[1, "F", each] < begun[1, "B", each] < begun[0, "B", each] for each in range(4))
    for name in ("figures.png", "timeline.png"):
        assert (tmp_path / "runs/08_pipeline_parallel" / name).read_bytes().startswith(b"\x89PNG")
    assert "25.0%  by formula" in done.stdout and "measured in the last step" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options, marks, bubble", [
    (["--layout", "pp4"], [4, 3, 2, 1], 3 / 4),
    ([SCHEDULE, "gpipe"], [4, 4], 1 / 4),
    ([SCHEDULE, "zero_bubble"], [2, 2], 1 / 12),
    (["--layout", "dp2_pp2", SCHEDULE, "interleaved", CHUNKS, "2"], [4, 4, 3, 3], 1 / 4),
    (["--layout", "pp2_tp2"], [2, 2, 1, 1], 1 / 4),
    (["--layout", "fsdp2_pp2"], [2, 2, 1, 1], 1 / 2),
])  # fmt: skip
def test_layouts_and_schedules_train_like_one_process(options, marks, bubble, tmp_path):
    told = told_by(start(*options, cwd=tmp_path), tmp_path)
    assert kept(told) == marks and list(told["pipeline"]["bubbles"].values())[:2] == pytest.approx([bubble, bubble])


@pytest.mark.slow
def test_pytorchs_pipeline_trains_like_one_process_and_says_nothing_of_its_actions(tmp_path):
    done = start("--parallel.backend", "torch", cwd=tmp_path)
    assert "actions" not in told_by(done, tmp_path)["pipeline"]["ranks"][0] and "measured in" not in done.stdout


WRONG = [
    (["--layout", "pp5"], "with 4 layers: 5 stages need at least one each"),
    ([SCHEDULE, "interleaved", CHUNKS, "2", "--batch_size", "6"], "groups of 2, as many as there are ranks, and a step has 3"),
    (["--layout", "pp2_tp3"], "does not divide num_attention_heads 4"),
    (["--layout", "pp2_qp2"], "not understood at 'qp2'"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in WRONG], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_wrong_option_is_one_sentence_before_anything_starts(refusals, options, said):
    done = refusals[*options]
    assert refused(done, said) and done.returncode == 1


def test_a_learners_own_schedule_runs_and_a_wrong_one_is_refused_with_its_place(tmp_path):
    write_solutions(tmp_path)
    mine = catalogue.find_chapter("08").stub_file(tmp_path)
    right, warmup = mine.read_text(encoding="utf-8"), "min(microbatches, ranks - rank - 1)"
    assert right.count(warmup) == 1

    mine.write_text(right.replace(warmup, "min(microbatches, ranks - rank)"), encoding="utf-8")  # one more than 1F1B needs
    done = start("--impl", "mine", cwd=tmp_path)
    assert kept(told_by(done, tmp_path)) == [3, 2] and re.search(r"(\d+) of \1 parts are yours", done.stdout)

    mine.write_text(right.replace(warmup, "rank"), encoding="utf-8")
    done = start("--impl", "mine", cwd=tmp_path)
    assert done.returncode == 1 and "Deadlock, with sends that return at once: rank 0" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "then one process" not in done.stdout
