"""Extensions by import path: the examples of chapters/12_grpo/EXTENDING.md as they stand, layouts, resuming, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from scripts import refused, run_script
from trainer_runs import TRAIN

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.optim.config import OptimizerConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.trainer.config import TrainerConfig
from shared.trainer.models import require_extensions, require_whole_parameters
from shared.trainer.records.history import changes_of
from shared.trainer.run import build, train_model
from shared.trainer.settings import parse_words

PAGE = (CHECKOUT / "chapters" / "12_grpo" / "EXTENDING.md").read_text()
EXAMPLES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.S))
COMMANDS = re.findall(r'^python "\$COURSE/chapters/12_grpo/train.py" (\S+)$', PAGE, re.M)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder outside of the course with all that the page has one write, after the run of base.yaml."""
    folder = tmp_path_factory.mktemp("my_project")
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    (folder / "text").mkdir()
    copied = re.search(r'^cp ((?:"\$COURSE"/\S+ )+)text/$', PAGE, re.M)[1].replace('"$COURSE"/', "").split()
    for path in (path for pattern in copied for path in sorted(CHECKOUT.glob(pattern))):
        shutil.copy(path, folder / "text")
    done = run_script(TRAIN, "base.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_example_has_its_command():
    assert set(COMMANDS) == {name for name in EXAMPLES if name.endswith(".yaml")} and len(COMMANDS) == 8


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "base.yaml"])
def test_an_example_runs_as_it_stands_and_does_what_it_says(project, name):
    done = run_script(TRAIN, name, cwd=project)
    assert done.returncode == 0, done.stderr
    folder = project / "runs" / Path(name).stem
    assert "The report:" in done.stdout
    lines, base = lines_of(folder), lines_of(project / "runs" / "base")
    of = lambda metrics, key: [line[key] for line in metrics if key in line]  # noqa: E731
    if name == "optimizer.yaml":
        assert of(lines, "train/loss")[-1] != of(base, "train/loss")[-1]
        step = max((folder / "checkpoints").glob("step-*"))
        assert any(key.endswith(".mean") or "mean" in key for file in step.glob("*.safetensors") for key in load_file(file))
    elif name == "schedule.yaml":
        assert of(lines, "learning_rate/adamw")[-1] == pytest.approx(of(base, "learning_rate/adamw")[-1] * 0.5 * (2 / 8) ** 0.5)
    elif name == "objective.yaml":
        assert of(lines, "train/loss")[0] == pytest.approx(0.5 * of(base, "train/loss")[0], rel=1e-6)
        assert of(lines, "train/unscaled")[0] == pytest.approx(of(base, "train/loss")[0], rel=1e-6)
        assert of(lines, "validation/loss")[0] == pytest.approx(of(base, "validation/loss")[0], rel=0.02)
    elif name == "callback.yaml":
        assert of(lines, "count/tokens")[-1] > 0 and "tokens after step 2" in done.stdout
    elif name == "cleaning.yaml":
        prepared = {path.parent for path in (project / "runs" / "prepared").glob("*/report.json")}
        assert any("few links" in (path / "report.json").read_text() for path in prepared)
    elif name == "part.yaml":
        assert any("up_proj" in key for key in weights_of(folder)) and not any("gate_proj" in key for key in weights_of(folder))
    elif name == "reward.yaml":
        assert any("brevity" in key for line in lines for key in line)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    step = max((folder / "checkpoints").glob("step-*"))
    return {key: value for file in step.glob("weights*.safetensors") for key, value in load_file(file).items()}


def test_a_project_that_was_moved_goes_on_with_its_run(project, tmp_path):
    moved = shutil.copytree(project, tmp_path / "moved", ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(project / "runs" / "prepared", moved / "runs" / "prepared")
    first = run_script(TRAIN, "optimizer.yaml", "steps=1", cwd=moved)
    assert first.returncode == 0, first.stderr
    again = run_script(TRAIN, "optimizer.yaml", "steps=1", cwd=moved.rename(tmp_path / "elsewhere"))
    assert again.returncode == 0 and "Going on from step 1" in again.stdout, again.stderr
    other = run_script(TRAIN, "optimizer.yaml", "steps=1", "optimizer.options.momentum=0.5", cwd=tmp_path / "elsewhere")
    assert refused(other, "optimizer.options.momentum (0.8 there, 0.5 here)")


LAYOUTS = {
    "optimizer.yaml": ["dp2", "dp2_zero1", "dp2_zero2", "fsdp2", "tp2", "pp2"],
    "objective.yaml": ["dp2", "fsdp2", "tp2", "pp2"],
    "part.yaml": ["dp2_zero1", "fsdp2", "pp2"],
}


def trained(project: Path, name: str, folder: Path, layout: str = "dp1", *words: str) -> dict[str, torch.Tensor]:
    """The weights after the run of an example in a layout, in float64 where one can."""
    parallel = parse_layout(layout)
    degrees = [f"parallel.{key}={value}" for key, value in vars(parallel).items() if key.endswith(("parallel", "sharded", "zero"))]
    text, prepared = project / "text", project / "runs" / "prepared"
    where = [f"data.prepare.sources=[{{path: {text}}}]", f"data.prepared={prepared}", f"engine.output={folder}"]
    config = parse_words(TrainerConfig, [str(project / name), *degrees, *where, "steps=4", *words])
    require_extensions(config)  # loads the file once for all threads

    def work(world):
        run = build(config, QUIET, world)
        run.engine.fit(*run.mode.loaders(run.config, run.strategy), steps=config.steps)
        return run.strategy.full_weights()

    return run_threads(work, parallel.ranks)[0]


@pytest.fixture(scope="module")
def alone(project, tmp_path_factory):
    return {name: trained(project, name, tmp_path_factory.mktemp("alone") / "run") for name in LAYOUTS}


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts])
def test_an_extension_trains_the_same_model_in_any_layout(project, alone, tmp_path, name, layout):
    found, expected = trained(project, name, tmp_path / "run", layout), alone[name]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert (found[key] - weight).norm() <= 1e-4 * weight.norm(), key


@pytest.mark.parametrize("name", ["optimizer.yaml", "callback.yaml"])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(project, tmp_path, name):
    whole = trained(project, name, tmp_path / "whole", "dp1", "engine.checkpoint.every=2", "engine.log_every=1")
    left = shutil.copytree(tmp_path / "whole", tmp_path / "left")
    shutil.rmtree(left / "checkpoints" / "step-00000004")
    (left / "metrics.jsonl").write_text("")
    again = trained(project, name, left, "dp1", "engine.checkpoint.every=2", "engine.log_every=1")
    assert all(torch.equal(again[key], weight) for key, weight in whole.items())
    assert [line["step"] for line in lines_of(left)][-1] == 4
    if name == "callback.yaml":
        assert lines_of(left)[-1]["count/tokens"] == lines_of(tmp_path / "whole")[-1]["count/tokens"]


def test_an_optimizers_state_moves_to_another_layout(project, alone, tmp_path):
    run = tmp_path / "run"
    trained(project, "optimizer.yaml", run, "fsdp2", "engine.checkpoint.every=2")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    again = trained(project, "optimizer.yaml", run, "dp2", "engine.checkpoint.every=2")
    for key, weight in alone["optimizer.yaml"].items():
        assert (again[key] - weight).norm() <= 1e-4 * weight.norm(), key


REFUSED = {
    "optimizer.name=my_optimizer.SignMomentun": "has no class or function 'SignMomentun'. Did you mean 'SignMomentum'?",
    "optimizer.name=my_optimiser.SignMomentum": "there is no module my_optimiser in",
    "optimizer.name=adamv": "Did you mean 'adamw'?",
    "optimizer.name=my_callback.CountTokens optimizer.options=null": "is no torch.optim.Optimizer",
    "optimizer.options={momentun: 0.5}": "SignMomentum takes no 'momentun'. Did you mean 'momentum'?",
    "optimizer.options={lr: 0.5}": "hold lr, which is a setting of its own",
    "optimizer.betas=[0.9, 0.99]": "betas is for the optimizers of the core",
    "schedule.name=my_schedule.inverse_squareroot": "Did you mean 'inverse_square_root'?",
    "schedule.name=my_schedule.inverse_square_root schedule.options={scales: 1}": "Did you mean 'scale'?",
    "objective=my_objective.scale": "Did you mean 'scaled'?",
    "objective=my_callback.CountTokens": "CountTokens cannot be called so",
    "engine.callbacks=[my_callback.CountToken]": "Did you mean 'CountTokens'?",
    "engine.callbacks=[my_stage.FewLinks]": "is no callback: derive it from shared.engine.callbacks.Callback",
    "data.prepare.cleaning.stages=[repairs]": "Did you mean 'repair'?",
    "data.prepare.cleaning.stages=[my_callback.CountTokens]": "has no name: a stage needs name, remembers, measure, decide",
    "model.parts.feed_forward=my_part.SquaredRelu report.export=false": "Did you mean 'SquaredReLU'?",
    "model.parts.feed_forward=my_part.SquaredReLU": "give report.export false",
    "model.parts.feed_forward=my_part.SquaredReLU report.export=false parallel.tensor_parallel=2": "with parallel.tensor_parallel 2",
    "optimizer.name=broken.Anything": "broken.py cannot be loaded, line 2 (ZeroDivisionError",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_by_name_before_any_work(project, tmp_path, capsys, words):
    (project / "broken.py").write_text("one = 1\none / 0\n")
    said = ""
    try:
        config = parse_words(TrainerConfig, [str(project / "optimizer.yaml"), f"engine.output={tmp_path / 'run'}",
                                             *re.split(r" (?=[a-z_.]+=)", words)])  # fmt: skip
        require_extensions(config)
    except CourseError as error:
        said = str(error)
    except SystemExit:
        said = " ".join(capsys.readouterr().err.split())
    assert REFUSED[words] in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("my_reward.brevty", "has no class or function 'brevty'. Did you mean 'brevity'?"),
        ("my_reward.brevity, options: {word: 3}", "grpo.rewards: brevity takes no 'word'. Did you mean 'words'?"),
    ],
)
def test_a_reward_that_cannot_be_had_is_refused_before_the_model_is_built(project, tmp_path, reward, said):
    words = [f"grpo.rewards=[{{name: task}}, {{name: {reward}}}]", f"engine.output={tmp_path / 'run'}"]
    done = run_script(TRAIN, "reward.yaml", *words, cwd=project)
    assert refused(done, said) and "parameters" not in done.stdout and not (tmp_path / "run" / "config.yaml").exists()


def test_an_optimizer_whose_code_was_edited_is_taken_with_a_line_that_the_history_keeps(project, tmp_path):
    mine = shutil.copytree(project, tmp_path / "mine", ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(project / "runs" / "prepared", mine / "runs" / "prepared")
    words = ["optimizer.yaml", "continue_with=steps"]
    assert run_script(TRAIN, "optimizer.yaml", "steps=2", cwd=mine).returncode == 0
    line = "The code of my_optimizer.py:SignMomentum was edited since: it counts from step {} on."
    same = run_script(TRAIN, *words, "steps=3", cwd=mine)
    assert same.returncode == 0 and "was edited since" not in same.stdout, same.stderr
    (mine / "my_optimizer.py").write_text(EXAMPLES["my_optimizer.py"].replace("mean.sign()", "mean.sign().mul(2)"))
    done = run_script(TRAIN, *words, "steps=3", cwd=mine)
    assert done.returncode == 0 and "was edited since" not in done.stdout, "no step is left that it would count from"
    run_script(TRAIN, *words, "steps=4", "optimizer.lr=no", cwd=mine)  # refused: nothing is recorded
    for steps, said in ((4, True), (5, False)):
        done = run_script(TRAIN, *words, f"steps={steps}", cwd=mine)
        assert done.returncode == 0 and (line.format(4) in " ".join(done.stdout.split())) == said, done.stdout + done.stderr
    remarks = [(change.step, line.format(4) in change.remarks) for change in changes_of(mine / "runs" / "optimizer")]
    assert remarks == [(2, False), (3, True), (4, False)]
    assert line.format(4) in (mine / "runs" / "optimizer" / "report.html").read_text()
    copy = ["steps=6", "continue_from=runs/optimizer", "engine.output=runs/copy"]
    (mine / "my_optimizer.py").write_text(EXAMPLES["my_optimizer.py"])
    assert line.format(6) in " ".join(run_script(TRAIN, *words, *copy, cwd=mine).stdout.split())


@pytest.mark.parametrize(("layout", "degree"), [("dp2_zero1", 0), ("fsdp2", 1), ("tp2", 1)])
def test_an_optimizer_for_whole_parameters_is_told_the_degree_that_leaves_them_whole(layout, degree):
    optimizer = OptimizerConfig("torch.optim.RMSprop", weight_decay=0.0)
    with pytest.raises(CourseError, match=f"else give {degree}[.]$"):
        require_whole_parameters(optimizer, parse_layout(layout))
    require_whole_parameters(optimizer, parse_layout("dp2"))


@pytest.mark.parametrize("layout", ["dp2_zero1", "fsdp2", "tp2"])
def test_an_optimizer_that_does_not_say_it_is_elementwise_is_refused_where_parameters_are_cut(project, tmp_path, layout):
    with pytest.raises(CourseError, match="RMSprop with parallel.* each rank would step its parts"):
        trained(project, "base.yaml", tmp_path / "run", layout, "optimizer.name=torch.optim.RMSprop", "optimizer.weight_decay=0.0")
    trained(project, "base.yaml", tmp_path / "run", "dp2", "optimizer.name=torch.optim.RMSprop", "optimizer.weight_decay=0.0")


def test_a_file_beside_the_configuration_comes_first_and_hides_no_module_of_pythons(project, tmp_path):
    (tmp_path / "random.py").write_text("def always(step):\n    return 0.25\n")
    (tmp_path / "mine.yaml").write_text(f"extends: {project / 'base.yaml'}\nschedule: {{name: random.always}}\n")
    done = run_script(TRAIN, tmp_path / "mine.yaml", "steps=1", f"engine.output={tmp_path / 'run'}", cwd=project)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["schedule"]["name"] == f"{tmp_path / 'random.py'}:always"
    assert lines_of(tmp_path / "run")[0]["learning_rate/adamw"] == pytest.approx(0.25e-3)


def test_a_changed_cleaning_stage_prepares_the_text_again(project, tmp_path):
    before = {path.name for path in (project / "runs" / "prepared").iterdir() if path.is_dir()}
    (tmp_path / "my_stage.py").write_text(EXAMPLES["my_stage.py"] + "\n# another content\n")
    stages = "data: {prepare: {cleaning: {stages: [my_stage.FewLinks]}}}"
    (tmp_path / "mine.yaml").write_text(f"extends: {project / 'cleaning.yaml'}\n{stages}\n")
    words = ["steps=1", "data.prepare.workers=2"]
    for folder in ("first", "second"):
        done = run_script(TRAIN, tmp_path / "mine.yaml", *words, f"engine.output={tmp_path / folder}", cwd=project)
        assert done.returncode == 0, done.stderr
        after = {path.name for path in (project / "runs" / "prepared").iterdir() if path.is_dir()}
        assert len(after - before) == 1
        before = after
        (tmp_path / "my_stage.py").write_text(EXAMPLES["my_stage.py"] + "\n# and another\n")
