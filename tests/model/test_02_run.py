"""Chapter 02's run and experiments as a reader uses them: small real runs, what they leave, and what bad options say."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from command_lines import run_each
from scripts import refused, run_script
from workspace import write_passed_build, write_solutions

from chapters import trials
from chapters.trials import Spread
from shared.course.paths import CHECKOUT
from shared.model.config import ModelConfig
from shared.model.counting import parameter_counts

FOLDER = CHECKOUT / "chapters" / "02_transformer"
SMALL = ["--steps", "20", "--evaluate_every", "10", "--model.hidden_size", "32", "--model.num_hidden_layers", "2", "--sample_bytes", "30"]
QUICK = ["--steps", "3", "--seeds", "2", "--seq", "32", "--batch_size", "2", "--windows", "4"]
POSITIONS = ["--experiment", "positions", *QUICK]


def start(script: str, *options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(FOLDER / script, *options, cwd=cwd, **how)


@pytest.fixture(scope="module")
def chapters_experiments():
    """experiments.py as a module."""
    specification = importlib.util.spec_from_file_location("experiments_of_chapter_02", FOLDER / "experiments.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_a_run_learns_and_leaves_its_results(tmp_path, text_file):
    done = start("run.py", *SMALL, "--data", text_file, "--prompt", "the ", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "runs/02_transformer/figures.json").read_text())
    losses = [loss for _, loss in record["training"]]
    assert len(losses) == 20 and losses[0] > 7.5 and losses[-1] < 5.0
    for said in ("TransformerModel", "held-out bits per byte", "a sample"):
        assert said in done.stdout


def test_a_build_that_passed_whole_is_trained_in_place_of_the_core(tmp_path, text_file):
    write_solutions(tmp_path)
    write_passed_build(tmp_path, "02")
    lines = [(), ("--steps", "2", "--model.position", "alibi", "--output", "other")]
    done, other = run_each(FOLDER / "run.py", lines, tmp_path, [*SMALL, "--impl", "mine", "--data", text_file]).values()
    assert done.returncode == 0 and "02.build runs" in done.stdout and "BuiltModel" in done.stdout, done.stderr
    losses = [loss for _, loss in json.loads((tmp_path / "runs/02_transformer/figures.json").read_text())["training"]]
    assert losses[0] > 7.5 and losses[-1] < 5.0
    assert other.returncode == 0 and "02.build is not used: this model is no LLaMA" in other.stdout and "TransformerModel" in other.stdout


OTHERS = {
    "ALiBi": "--model.position alibi",
    "post-norm": "--model.norm_position post --model.norm layer_norm",
    "a window": "--model.sliding_window 9",
    "GPT-2": "--model.position learned --model.tie_word_embeddings true --model.gated false --model.hidden_act gelu_tanh",
}


@pytest.fixture(scope="module")
def others(tmp_path_factory, text_file):
    return run_each(FOLDER / "run.py", map(str.split, OTHERS.values()), tmp_path_factory.mktemp("others"), [*SMALL, "--data", text_file])


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_models_are_an_option_away(others, model):
    done = others[*model.split()]
    assert done.returncode == 0 and "a sample" in done.stdout, done.stderr


BAD = [
    (["--model.num_attention_heads", "3"], "not a multiple of num_attention_heads (3)"),
    (["--model.positon", "rope"], "Did you mean 'model.position'"),
    (["--model.position", "rotary"], "rotary"),
    (["--model.architecture", "encoder"], "needs a decoder"),
    (["--model.vocab_size", "300"], "tokens are bytes here"),
    (["--seq", "256"], "seq is 256 and model.max_position_embeddings only 128"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """The folder where bad options were given, and what was said to each."""
    folder = tmp_path_factory.mktemp("refusals")
    return folder, run_each(FOLDER / "run.py", [options for options, _ in BAD], folder, SMALL)


@pytest.mark.parametrize(("options", "said"), BAD)
def test_a_bad_option_is_one_sentence_before_any_work(refusals, options, said):
    folder, ended = refusals
    assert refused(ended[*options], said) and not (folder / "runs").exists()


@pytest.fixture(scope="module")
def positions(tmp_path_factory, text_file):
    """The folder of an experiment, and what it printed."""
    folder = tmp_path_factory.mktemp("positions")
    done = start("experiments.py", *POSITIONS, "--data", text_file, cwd=folder, fresh=True)
    assert done.returncode == 0, done.stderr
    return folder / "runs/02_experiments", done.stdout


def test_an_experiment_shows_and_keeps_its_results(tmp_path, text_file, positions):
    folder = shutil.copytree(positions[0], tmp_path / "runs/02_experiments")
    assert (folder / "positions.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((folder / "positions.json").read_text())
    assert len(kept) == 2 * 5 and {entry["seed"] for entry in kept} == {0, 1}
    assert next(entry for entry in kept if entry["variant"] == "learned")["figures"]["at twice the length"] is None
    for said in ("positions: 3 steps, 2 seeds", "Lowest", "relative"):
        assert said in positions[1]

    kept[0]["figures"]["held-out bits per byte"] = 77.0  # a result that is there is not measured again
    (folder / "positions.json").write_text(json.dumps(kept[:7]))
    again, other = run_each(FOLDER / "experiments.py", [(), ("--steps", "2")], tmp_path, [*POSITIONS, "--data", text_file]).values()
    assert again.stdout.count(", seed ") == 3 and "77.000" in again.stdout
    assert other.stdout.count(", seed ") == 10, "other settings are other trials"


def test_an_experiment_refuses_what_cannot_be(tmp_path, text_file):
    (tmp_path / "runs/02_experiments").mkdir(parents=True)
    (tmp_path / "runs/02_experiments/norms.json").write_text("[1]")
    bad = {
        ("--experiment", "position"): "position",
        ("--experiment", "norms", "--seeds", "0"): "seeds is 0",
        ("--experiment", "norms", "--seq", "500"): "seq is 500",
        ("--experiment", "norms", *QUICK): "is not a file of experiment results",
    }
    for options, done in run_each(FOLDER / "experiments.py", bad, tmp_path, ["--data", text_file]).items():
        assert refused(done, bad[options]), options


def test_every_variant_is_a_model_and_rivals_are_of_one_size(chapters_experiments):
    sizes = {}
    for experiment, variants in chapters_experiments.EXPERIMENTS.items():
        for name, changes in variants.items():
            fields = {key: value for key, value in (chapters_experiments.BASE | changes).items() if key != "learning_rate"}
            sizes[experiment, name] = sum(parameter_counts(ModelConfig(**fields)).values())
    for experiment, tolerance in (("activations", 0.0), ("norms", 0.01), ("positions", 0.04)):
        of_one = [size for (which, _), size in sizes.items() if which == experiment]
        assert max(of_one) - min(of_one) <= tolerance * min(of_one), experiment


# The comparison itself.


def test_a_spread_is_mean_and_range():
    spread = Spread.of([1.0, 2.0, 6.0])
    assert (spread.mean, spread.low, spread.high) == (3.0, 1.0, 6.0)
    assert str(Spread.of([1.0, float("nan")])) == "diverged"
    assert spread.touches(Spread.of([6.0, 7.0])) and not spread.touches(Spread.of([6.1, 7.0]))


def test_a_verdict_claims_only_what_the_ranges_allow():
    results = {name: [{"loss": value} for value in values] for name, values in (("a", (1.0, 1.2)), ("b", (1.1, 1.4)), ("c", (2.0, 2.1)))}
    assert trials.verdict(results, "loss") == "Lowest mean loss: a. With 2 seeds it cannot be told from: b."
    del results["b"]
    assert "Its 2 seeds all lie below every other variant's" in trials.verdict(results, "loss")
    results["d"] = [{"loss": None}, {"loss": None}]
    assert "a" in trials.verdict(results, "loss")


def test_the_seed_changes_weights_and_order_and_the_same_one_repeats(tmp_path, text_file, positions):
    start("experiments.py", *POSITIONS, "--data", text_file, cwd=tmp_path)
    figures = []
    for folder in (positions[0], tmp_path / "runs/02_experiments"):
        kept = json.loads((folder / "positions.json").read_text())
        figures.append([entry["figures"]["held-out bits per byte"] for entry in kept])
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    assert abs(figures[0][0] - figures[0][5]) > 1e-4
