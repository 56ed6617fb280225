"""Chapter 05's run and experiments as a reader uses them: small real runs, what they leave, and what bad options say."""

import json
import subprocess

import pytest
from command_lines import run_each
from scripts import refused, run_script
from workspace import write_passed_build, write_solutions

from shared.course.paths import CHECKOUT

FOLDER = CHECKOUT / "chapters" / "05_optimizers"
SMALL = [
    "--steps", "20", "--evaluate_every", "5", "--schedule.warmup_steps", "4", "--sample_bytes", "30", "--seq", "32",
    "--model.hidden_size", "32", "--model.num_hidden_layers", "2",
]  # fmt: skip
PRECISE = ["--optimizer.newton_schulz_dtype", "float32"]
QUICK = ["--steps", "4", "--seeds", "2", "--seq", "16", "--batch_size", "2", "--windows", "4"]


def start(script: str, *options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(FOLDER / script, *options, cwd=cwd, **how)


def test_a_run_trains_both_and_says_when_the_second_was_there(tmp_path, text_file):
    done = start("run.py", *SMALL, "--data", text_file, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/05_optimizers"
    ends = {}
    for name in ("baseline", "run"):
        record = json.loads((folder / name / "figures.json").read_text())
        assert len(record["training"]) == 20 and record["training"][0][1] > 7.5
        ends[name] = record["held_out"][-1][1]
    said = " ".join(done.stdout.split())
    assert f"adamw ended at {ends['baseline']:.3f}" in said and "muon was there after" in said and "both.png" in said
    assert (folder / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_build_that_passed_whole_is_the_optimizer_of_both_runs(tmp_path, text_file):
    """Both optimizers are the same arithmetic in another order: in float32, 20 steps end within a hundredth of a bit."""
    write_solutions(tmp_path)
    write_passed_build(tmp_path, "05")
    ends = {}
    for implementation in ("reference", "mine"):
        where = ["--impl", implementation, "--output", implementation, "--data", text_file]
        done = start("run.py", *SMALL, *PRECISE, *where, cwd=tmp_path)
        assert done.returncode == 0 and ("05.build runs" in done.stdout) == (implementation == "mine"), done.stderr
        files = [tmp_path / implementation / name / "figures.json" for name in ("baseline", "run")]
        ends[implementation] = [json.loads(file.read_text())["training"][-1][1] for file in files]
    assert ends["mine"] == pytest.approx(ends["reference"], abs=0.01) and ends["mine"] != ends["reference"]


HALVES = ["bfloat16", "float16"]


@pytest.fixture(scope="module")
def in_halves(tmp_path_factory, text_file):
    """A run with another optimizer in each precision of 16 bits, and the folder that holds their folders."""
    folder = tmp_path_factory.mktemp("in_halves")
    options = "--baseline null --optimizer.name lion --optimizer.lr 0.003 --schedule.name wsd --schedule.decay_steps 5".split()
    lines = [["--precision", precision, "--output", precision] for precision in HALVES]
    return folder, run_each(FOLDER / "run.py", lines, folder, [*SMALL, *options, "--data", text_file])


@pytest.mark.parametrize("precision", HALVES)
def test_other_optimizers_and_precisions_are_an_option_away(in_halves, precision):
    folder, ended = in_halves
    done = ended["--precision", precision, "--output", precision]
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / precision / "run/figures.json").read_text())
    assert record["held_out"][-1][1] < 6.0 and not (folder / precision / "baseline").exists()


BAD = [
    (["--optimizer.name", "adam"], "adam"),
    (["--optimizer.learning_rate", "1"], "learning_rate"),
    (["--optimizer.lr", "-1"], "optimizer.lr is -1.0: give a number above 0"),
    (["--schedule.warmup_steps", "20"], "warm-up and decay need 21 steps and the run has 20"),
    (["--optimizer.to_adamw", "[nothing]"], "to_adamw: no trainable parameter has a name like 'nothing'"),
    (["--max_norm", "0"], "max_norm is 0.0"),
    (["--precision", "int8"], "int8"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, text_file):
    common = [*SMALL, "--baseline", "null", "--data", text_file]
    return run_each(FOLDER / "run.py", [options for options, _ in BAD], tmp_path_factory.mktemp("refusals"), common)


@pytest.mark.parametrize(("options", "said"), BAD)
def test_a_bad_option_is_one_sentence(refusals, options, said):
    assert refused(refusals[*options], said)


EXPERIMENTS = ["optimizer", "schedule", "batch", "order"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, text_file):
    """The folder of all experiments, and what was printed when each was measured, and when it was asked for again."""
    folder, common = tmp_path_factory.mktemp("measured"), [*QUICK, "--data", text_file]
    first, *others = ([f"--experiment={name}"] for name in EXPERIMENTS)
    done = {tuple(first): start("experiments.py", *common, *first, cwd=folder, fresh=True)}
    done |= run_each(FOLDER / "experiments.py", others, folder, common)
    again = run_each(FOLDER / "experiments.py", [first, *others], folder, common)
    return folder / "runs/05_experiments", done, again


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_shows_and_keeps_its_results(measured, experiment):
    folder, *ended = measured
    done, again = (each[f"--experiment={experiment}",] for each in ended)
    assert done.returncode == 0, done.stderr
    assert (folder / f"{experiment}.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((folder / f"{experiment}.json").read_text())
    assert {entry["seed"] for entry in kept} == {0, 1} and len({entry["variant"] for entry in kept}) * 2 == len(kept)
    assert "Lowest" in done.stdout
    if experiment == "optimizer":
        rates = json.loads((folder / "rates.json").read_text())
        assert len(rates) == 4 * 4 * 2 and "Best rate of each" in done.stdout and (folder / "rates.png").exists()
        assert all("steps to AdamW's loss" in entry["figures"] for entry in kept)
    if experiment == "batch":
        seen = {entry["settings"]["steps"] * entry["settings"]["batch_size"] for entry in kept}
        assert max(seen) <= 2 * 32 and min(seen) >= 8, "about the same number of windows for every variant"
    assert again.returncode == 0 and ", seed " not in again.stdout, "a result that is there is not measured again"


def test_an_experiment_refuses_what_cannot_be(tmp_path, text_file):
    bad = {("--steps", "3"): "at least 4", ("--seq", "500"): "seq is 500", ("--seeds", "0"): "seeds is 0"}
    common = ["--experiment", "order", "--data", text_file]
    for options, done in run_each(FOLDER / "experiments.py", bad, tmp_path, common).items():
        assert refused(done, bad[options]), options
