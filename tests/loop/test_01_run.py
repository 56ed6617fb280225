"""`make run` as a reader uses it: a small real run, the learner's parts in it, and what bad options say."""

import json
import subprocess

import pytest
from command_lines import run_each
from safetensors.torch import load_file
from scripts import refused, run_script

from shared.course import catalogue, stubs
from shared.course.assignments import builds, fingerprint
from shared.course.paths import CHECKOUT
from shared.course.progress import Progress

SCRIPT = CHECKOUT / "chapters" / "01_training_loop" / "run.py"
SMALL = ["--steps", "30", "--evaluate_every", "10", "--model.hidden_size", "32", "--sample_bytes", "40"]


def run(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *options, cwd=cwd, **how)


def losses_in(folder) -> list[float]:
    return [loss for _, loss in json.loads((folder / "figures.json").read_text())["training"]]


@pytest.fixture(scope="module")
def learned(tmp_path_factory, text_file):
    """A run, and the folder where it was started."""
    folder = tmp_path_factory.mktemp("learned")
    done = run(*SMALL, "--data", text_file, "--prompt", "the ", cwd=folder, fresh=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.check
def test_a_run_learns_and_leaves_its_results(learned):
    folder = learned[0] / "runs" / "01_training_loop"
    losses = losses_in(folder)
    assert len(losses) == 30 and losses[0] > 7.0 and losses[-1] < 4.0
    assert [step for step, _ in json.loads((folder / "figures.json").read_text())["held_out"]] == [10, 20, 30]
    assert (folder / "sample.txt").read_text().startswith("the ")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_file(folder / "model.safetensors")["head.weight"].shape == (256, 32)
    for said in ("held-out bits per byte", "0 of 6 parts are yours", "a sample"):
        assert said in learned[1]


def test_the_same_seed_gives_the_same_run_however_it_is_cut(tmp_path, text_file, learned):
    lines = [["--output", "again"], ["--output", "cut", "--micro_batch_size", 5], ["--output", "other", "--seed", 1]]
    run_each(SCRIPT, lines, tmp_path, [*SMALL, "--data", f"[{text_file}]"])
    whole = losses_in(learned[0] / "runs" / "01_training_loop")
    assert losses_in(tmp_path / "again") == whole
    assert losses_in(tmp_path / "cut") == pytest.approx(whole, rel=1e-3)
    assert losses_in(tmp_path / "other") != pytest.approx(whole, rel=1e-3)


def learners_folder(tmp_path, *left_out: str):
    chapter = catalogue.find_chapter("01")
    text = chapter.solution_file.read_text(encoding="utf-8")
    solution = stubs.BodyFile.read(chapter.solution_file)
    for exercise in chapter.exercises:
        if exercise.name in left_out:
            text = text.replace(solution.text(exercise.name), stubs.stub_of(exercise.contract))
    path = chapter.stub_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")


def test_mine_trains_on_the_learners_parts(tmp_path, text_file):
    learners_folder(tmp_path)
    done = run(*SMALL, "--data", f"[{text_file}]", "--impl", "mine", cwd=tmp_path)
    assert done.returncode == 0 and "6 of 6 parts are yours (implementation: mine)" in done.stdout


def test_mine_names_a_missing_part_before_it_starts(tmp_path, text_file):
    learners_folder(tmp_path, "evaluate", "sample_next")
    done = run(*SMALL, "--data", f"[{text_file}]", "--impl", "mine", cwd=tmp_path)
    assert refused(done, "01.evaluate, 01.sample_next are not written yet in chapters/01_training_loop/exercises.py")
    assert "IMPL=mixed" in done.stderr and not (tmp_path / "runs").exists()


BAD = [
    (["--step", "3"], "Did you mean 'steps'"),
    (["--steps", "many"], "steps is 'many': give a whole number"),
    (["--impl", "theirs"], "theirs"),
    (["--data", "[nowhere.txt]"], "nowhere.txt does not exist"),
    (["--data", "[short.txt]"], "fewer than one window of 64 + 1"),
    (["--output", "short.txt/folder"], "cannot be written"),
    (["--prompt", ""], "prompt is empty"),
    (["--device", "cuda"], "no CUDA device"),
    (["--steps", "0"], "steps is 0"),
    (["--temperature", "-1"], "temperature is -1"),
]
UNKNOWN_KEY = ["--config", "mine.yaml"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The ends of the command lines that start no training."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "short.txt").write_text("short")
    (folder / "mine.yaml").write_text("model:\n  windw: 8\n")
    return run_each(SCRIPT, [*(options for options, _ in BAD), ["--help"], UNKNOWN_KEY], folder, SMALL)


@pytest.mark.parametrize(("options", "said"), BAD)
def test_a_bad_option_is_one_sentence_before_any_work(ended, options, said):
    done = ended[*options]
    assert refused(done, said) and "step " not in done.stdout


def test_an_unknown_key_in_a_yaml_file_is_named_with_the_nearest(ended):
    done = ended[*UNKNOWN_KEY]
    assert refused(done, "windw") and "Did you mean 'model.window'" in done.stderr and done.returncode == 2


def test_help_explains_every_option(ended):
    done = ended["--help",]
    for said in ("--micro_batch_size", "windows in one forward and backward", "--model.window", "default: 4000"):
        assert said in done.stdout


def test_a_build_that_passed_whole_trains_by_its_own_recipe_and_one_that_did_not_is_named(tmp_path, text_file):
    learners_folder(tmp_path)
    build, long_text = builds()["01.build"], tmp_path / "long.txt"
    build.file(tmp_path).write_text(build.solution_file.read_text(encoding="utf-8"), encoding="utf-8")
    text = fingerprint(stubs.BodyFile.read(build.file(tmp_path)))
    for stage in build.stages[:-1]:
        Progress(tmp_path).record_check(stage.id, text)
    long_text.write_text("the cat sat on the mat.\n" * 6000, encoding="utf-8")
    options = ["--impl", "mine", "--steps", "30", "--evaluate_every", "10", "--sample_bytes", "40", "--data", long_text]
    assert "01.build is not used: 8 of 9 stages passed" in run(*SMALL, "--impl", "mine", "--data", text_file, cwd=tmp_path).stdout
    Progress(tmp_path).record_check(build.stages[-1].id, text)
    done = run(*options, cwd=tmp_path)
    assert done.returncode == 0 and "01.build runs" in done.stdout and "a sample" in done.stdout, done.stderr
    folder = tmp_path / "runs" / "01_training_loop"
    record = json.loads((folder / "figures.json").read_text())
    assert [step for step, _ in record["held_out"]] == [10, 20, 30]
    assert record["training"][0][1] > 7.0 and record["training"][-1][1] < 4.0
    assert load_file(folder / "model.safetensors")["head.weight"].shape == (256, 128), "the build's model, not the chapter's"
    assert (folder / "loss.png").exists() and (folder / "sample.txt").exists()
