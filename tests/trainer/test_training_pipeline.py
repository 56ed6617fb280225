"""A training pipeline as its user starts it: stages in a chain, refusals before the first one, kills and resumes, one report over all."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from pipelines import LENGTHS, command, pipeline_file
from preferring_runs import preferring_file
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import settings_file

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import IN_ALL
from shared.trainer.pipeline import chain
from shared.trainer.pipeline.report import Row, ability_tables, minutes_of, win_rates, write_report
from shared.trainer.pipeline.stages import FOLDER, Stage, read_pipeline
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

QUIET = Console(quiet=True)
STAGES = ("pretrain", "sft", "dpo", "grpo")


def finish(path: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(path, *words), capture_output=True, text=True, timeout=600)


def train_here(stage: Stage) -> int:
    """`run_stage` in this process, which has imported everything already."""
    train_model(parse_words(TrainerConfig, [str(stage.file), *stage.words]), QUIET)
    return 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A pipeline that was run to its end: its file."""
    path = pipeline_file(tmp_path_factory.mktemp("undisturbed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "run_stage", train_here)
        chain.run_pipeline(read_pipeline(path), QUIET)
    return path


def weights_of(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(path.parent / "all" / name / "model" / "model.safetensors") for name in STAGES}


def require_same_weights(path: Path, other: Path) -> None:
    for name, weights in weights_of(path).items():
        theirs = weights_of(other)[name]
        assert weights.keys() == theirs.keys() and all(torch.equal(weights[key], theirs[key]) for key in weights), name


def test_each_stage_starts_from_the_stage_before_and_the_report_judges_the_model_of_every_stage(undisturbed):
    pipeline = read_pipeline(undisturbed)
    for before, stage in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        config = yaml.safe_load((stage.folder / "config.yaml").read_text())
        assert config["start_from"] == str(before.folder) and config["mode"] == stage.name
    text, tasks, pairs, checked = ability_tables(pipeline)
    results = [json.loads((stage.folder / "results.json").read_text()) for stage in pipeline.stages]
    rows = {table.name: {row.name.partition(" (")[0]: row.values for row in table.rows} for table in (text, tasks, pairs, checked)}
    won_over = "win rate over the previous stage"
    assert all(None not in values for table in rows.values() for name, values in table.items() if name != won_over)

    # The runs themselves judged the model of their own stage, and that of the stage before, by other ways through the code.
    assert rows["pretrain"]["bits per byte"][0] == pytest.approx(results[0]["summary"]["held-out bits per byte"], rel=1e-6)
    assert rows["sft"]["right: all"][:2] == [results[1]["summary"][f"held-out tasks right {when}"] for when in ("before", "after")]
    reward = [results[2]["summary"][f"hidden preference's reward {when}"] for when in ("before", "after")]
    assert rows["dpo"]["mean reward: all"][1:3] == pytest.approx(reward, rel=1e-9)
    won = results[2]["summary"]["win rate over the first model, by the hidden preference"]
    assert rows["dpo"][won_over][2] == pytest.approx(won, rel=1e-9)
    for k in (1, 2, 4):
        passed = [results[3]["summary"][f"held-out pass@{k} {when}"] for when in ("before", "after")]
        assert rows["grpo"][f"right at temperature 1: pass@{k}"][2:] == pytest.approx(passed, rel=1e-9)


def test_the_page_holds_every_stage_and_escapes_what_models_wrote(undisturbed):
    folder = undisturbed.parent / "all"
    kept = json.loads((folder / "dpo" / "abilities.json").read_text())
    kept["dpo"]["answers"][0]["text"] = "<script>alert(1)</script>"
    (folder / "dpo" / "abilities.json").write_text(json.dumps(kept))
    page = write_report(read_pipeline(undisturbed)).read_text()
    assert all(f'<a href="{name}/report.html">' in page for name in STAGES) and "src=\"http" not in page and "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page and page.count("data:image/png;base64,") > 10


def test_finished_stages_are_kept_and_other_settings_are_refused_by_stage(undisturbed, tmp_path):
    path = tmp_path / "again.yaml"
    settings = yaml.safe_load(undisturbed.read_text())
    path.write_text(yaml.safe_dump(settings))
    assert all(stage.is_finished() for stage in read_pipeline(path, ["engine.log_every=7", "report.new_tokens=9"]).stages)
    changed = read_pipeline(path, ["stages.dpo.optimizer.lr=0.5"])
    told = r"Stage dpo was trained with other settings: optimizer.lr \(0.02 there, 0.5 here\). .*stages.dpo.continue_with=optimizer.lr to"
    with pytest.raises(CourseError, match=told):
        changed.stages[2].is_finished()
    asked = read_pipeline(path, ["stages.dpo.optimizer.lr=0.5", "stages.dpo.continue_with=optimizer.lr"])
    assert [stage.is_finished() for stage in asked.stages[:3]] == [True, True, False], "its run is continued"
    copy = tmp_path / "copy"
    shutil.copytree(settings["output"], copy)
    moved = read_pipeline(path, [f"output={copy}"])
    assert moved.stages[3].is_finished()
    weights = copy / "dpo" / "model" / "model.safetensors"
    shutil.copy(copy / "sft" / "model" / "model.safetensors", weights)
    with pytest.raises(CourseError, match="Stage grpo was trained from other weights than stage dpo has now: delete"):
        moved.stages[3].is_finished()


def killed(path: Path, stage: str, checkpoint: int) -> None:
    """Start the pipeline, and kill it with its stage as soon as the stage has saved a checkpoint."""
    folder = path.parent / "all" / stage
    with subprocess.Popen(command(path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as begun:
        while not (folder / "checkpoints" / f"step-{checkpoint:08d}").is_dir():
            assert begun.poll() is None, f"it ended before {stage} saved"
            time.sleep(0.01)
        children = Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()
        for number in (begun.pid, *map(int, children)):
            os.kill(number, signal.SIGKILL)
    for number in map(int, children):
        while Path(f"/proc/{number}").exists():
            time.sleep(0.01)


@pytest.mark.slow
def test_a_pipeline_that_is_killed_in_every_stage_ends_with_the_same_weights(undisturbed, tmp_path):
    path = pipeline_file(tmp_path)
    for stage in STAGES:
        killed(path, stage, 1)
        assert not (tmp_path / "all" / stage / "stage.json").exists()
    done = finish(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": finished, in ") == 3 and "Going on from step" in done.stdout
    require_same_weights(path, undisturbed)


def test_a_stage_that_was_killed_is_resumed_and_those_before_it_are_not_trained_again(undisturbed, tmp_path):
    path = pipeline_file(tmp_path)
    shutil.copytree(undisturbed.parent / "all", tmp_path / "all")
    shutil.copytree(undisturbed.parent / "prepared", tmp_path / "prepared", dirs_exist_ok=True)
    folder = tmp_path / "all" / "grpo"
    for name in ("stage.json", "results.json", "abilities.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "model")
    for step in (2, 3):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    assert (folder / "checkpoints" / "step-00000001").is_dir()
    done = finish(path, f"data.prepared={undisturbed.parent / 'prepared'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": finished, in ") == 3 and "step 1 of" not in done.stdout
    require_same_weights(path, undisturbed)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ouput": "x"}, "Did you mean 'output'"),
        ({"stages": []}, "has no stages"),
        ({"stages": [{"name": "a", "config": "nowhere.yaml"}]}, "stage a: There is no configuration .*nowhere.yaml"),
        ({"stages": [{"name": "a", "config": "x.yaml"}, {"name": "a", "config": "x.yaml"}]}, "two stages of the name a"),
        ({"stages": [{"name": "../a", "config": "x.yaml"}]}, "its name is a folder's"),
        ({"stages": [{"name": "a", "config": "x.yaml", "word": {}}]}, r"stages\[0\].word"),
        ({"stages": [{"name": "a", "config": "x.yaml", "words": [1]}]}, "stage a: words is"),
        ({"stages": [{"config": "x.yaml"}]}, "name is missing"),
    ],
)
def test_files_that_are_no_pipeline_are_refused(tmp_path, changes, sentence):
    with pytest.raises(CourseError, match=sentence):
        read_pipeline(pipeline_file(tmp_path, **changes))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stages.grpo.optimzer.lr=1"], "stage grpo: .*Did you mean 'optimizer.lr'"),
        (["stages.grpo.grpo.answers=1"], "stage grpo: .*answers"),
        (["stages.reward.steps=1"], "one of pretrain, sft, dpo, grpo"),
        (["stages.sft.start_from=x"], "stage sft: start_from is given, which the pipeline decides"),
        (["engine.output=x"], "engine.output is given"),
        (["layout=cp2"], "stage dpo: .*context_parallel is 2, and mode dpo needs each answer whole"),
        (["steps"], "'steps' is not a setting"),
    ],
)
def test_words_that_cannot_be_are_refused_by_stage_before_anything_starts(tmp_path, words, sentence):
    with pytest.raises(CourseError, match=sentence):
        read_pipeline(pipeline_file(tmp_path), words)


def test_a_stage_that_starts_from_nothing_is_refused(tmp_path):
    reward = str(preferring_file(tmp_path / "reward", tmp_path / "base", "reward", **LENGTHS))
    dpo = str(preferring_file(tmp_path / "alone", tmp_path / "base", "dpo", start_from=None, **LENGTHS))
    with pytest.raises(CourseError, match="stage dpo: mode is dpo and start_from is null"):
        read_pipeline(pipeline_file(tmp_path, stages=[{"name": "dpo", "config": dpo}]))
    with pytest.raises(CourseError, match="stage dpo: it starts from nothing, because only reward models come before it"):
        read_pipeline(pipeline_file(tmp_path, stages=[{"name": "reward", "config": reward}, {"name": "dpo", "config": dpo}]))


def test_ppo_asks_the_reward_model_before_it_and_starts_from_the_language_model_before_that(tmp_path):
    text = str(settings_file(tmp_path / "a", tmp_path / "prepared", model={"max_position_embeddings": 128}, **LENGTHS))
    made = {"reward": preferring_file(tmp_path / "r", tmp_path, "reward", **LENGTHS)}
    made["ppo"] = preferring_file(tmp_path / "p", tmp_path, "ppo", ppo={"reward": "model", "reward_model": "elsewhere"}, **LENGTHS)
    stages = [{"name": "text", "config": text}, *({"name": name, "config": str(file)} for name, file in made.items())]
    _, reward, ppo = read_pipeline(pipeline_file(tmp_path, stages=stages)).stages
    assert reward.start.name == ppo.start.name == "text" and ppo.judge is reward
    assert f"ppo.reward_model={tmp_path / 'all' / 'reward'}" in ppo.words


def test_a_layout_is_every_stages_but_where_the_file_gives_one_and_has_a_folder(tmp_path):
    path = pipeline_file(tmp_path)
    pipeline = read_pipeline(path, ["layout=dp2", "stages.grpo.layout=one"])
    assert [stage.layout for stage in pipeline.stages] == ["dp2", "dp2", "dp2", "one"]
    assert [stage.config.parallel.data_parallel for stage in pipeline.stages] == [2, 2, 2, 1]
    assert pipeline.output == tmp_path / "all-dp2" and read_pipeline(path, ["layout=dp2", "output=x"]).output == Path("x")


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.yaml")))
def test_the_courses_own_pipelines_are_read(name):
    stages = read_pipeline(FOLDER / f"{name}.yaml").stages
    assert [stage.config.mode for stage in stages] == list(STAGES)
    with pytest.raises(CourseError, match="There is no pipeline labtop: give one of .*laptop"):
        read_pipeline(FOLDER / "labtop.yaml")


@pytest.mark.parametrize(
    ("number", "code", "sentence"),
    [(signal.SIGINT, 130, "stopped; the same command continues there"), (signal.SIGKILL, 137, "killed by SIGKILL; the same command")],
)
def test_a_signal_reaches_the_stage_and_the_sentence_says_how_to_continue(tmp_path, capsys, monkeypatch, number, code, sentence):
    stage = read_pipeline(pipeline_file(tmp_path)).stages[0]
    script = tmp_path / "stage.py"
    script.write_text("import os, signal, sys, time\n"
                      "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
                      f"os.kill(os.getppid() if {int(number)} == signal.SIGINT else os.getpid(), {int(number)})\n"
                      "time.sleep(60)\n")  # fmt: skip
    from shared.trainer.launch import start

    monkeypatch.setattr(start, "TRAIN", script)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as left:
        chain.require_end(chain.run_stage(stage), "Stage 1 of 4, pretrain")
    assert left.value.code == code and f"Stage 1 of 4, pretrain: {sentence}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stage_that_fails_ends_the_pipeline_with_its_code(capsys):
    with pytest.raises(SystemExit) as left:
        chain.require_end(3, "Stage 2 of 4, sft")
    assert left.value.code == 3 and "Stage 2 of 4, sft: failed with exit code 3" in capsys.readouterr().err


def test_minutes_of_a_stage_are_those_that_its_parts_took(undisturbed):
    """The whole stands beside its parts in what a run leaves, and is not added to them."""
    summary = json.loads((read_pipeline(undisturbed).stages[1].folder / "results.json").read_text())["summary"]
    parts = [value for name, value in summary.items() if name.startswith("seconds ") and "in all" not in name]
    assert minutes_of(summary) * 60 == pytest.approx(sum(parts)) and minutes_of(summary) * 60 < 1.1 * summary[IN_ALL]
    assert minutes_of({"seconds in training steps": 60.0, IN_ALL: 61.0}) == 1


def test_changes_are_marked_by_their_direction():
    assert [change for _, change in Row("bits per byte", [2.0, 1.9, 1.95]).cells] == ["", "better", "worse"]
    assert Row("right: all (10)", [None, 0.5, 0.4]).cells == [("–", ""), ("50 %", ""), ("40 %", "worse")]
    scored = [{"answers": [{"score": score} for score in scores]} for scores in ((0, 1, 1), (1, 0, 1))]
    assert win_rates([None, scored[0], None, scored[1]]) == [None, None, None, pytest.approx(0.5)]


def test_make_passes_the_words_on():
    words = ["run", "PIPELINE=laptop", "LAYOUT=dp2", "IMPL=mine", "ARGS=steps=3"]
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/ready", *words]
    shown = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    assert shown.split()[1:] == ["-m", "shared.trainer.pipeline.chain", "chapters/12_grpo/pipelines/laptop.yaml", "layout=dp2", "impl=mine",
                                 "steps=3"]  # fmt: skip
