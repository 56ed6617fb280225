"""Continue a run in another folder (`continue_from`): all of its state is there, the first folder stays as it is, and what is refused."""

import shutil
from io import StringIO

import pytest
from retuned_runs import PLAIN, QUIET, equal, rates_of, weights_at
from rich.console import Console
from trainer_runs import settings_file

from shared.course.errors import CourseError
from shared.trainer.config import TrainerConfig
from shared.trainer.records.continuation import nothing_to_continue
from shared.trainer.records.history import changes_of
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words


def test_a_run_is_continued_whole_in_another_folder_and_the_first_stays_as_it_is(tmp_path, prepared, short):
    files = {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
    path = settings_file(tmp_path, prepared, **PLAIN | {"steps": 8})
    words = [str(path), f"continue_from={short / 'run'}", "continue_with=steps"]
    train_model(parse_words(TrainerConfig, words), QUIET)
    shutil.copytree(short / "run", tmp_path / "there/run")
    there = settings_file(tmp_path / "there", prepared, **PLAIN | {"steps": 8})
    train_model(parse_words(TrainerConfig, [str(there), "continue_with=steps"]), QUIET)
    assert equal(weights_at(tmp_path / "run", 8), weights_at(tmp_path / "there/run", 8))
    assert {path: path.read_bytes() for path in short.rglob("*") if path.is_file()} == files
    copied, resumed = changes_of(tmp_path / "run")
    assert copied.source.endswith("step-00000004") and resumed.settings == {"steps": [4, 8]}
    assert sorted(rates_of(tmp_path / "run")) == sorted(rates_of(tmp_path / "there/run")), "the curves begin at step 1"
    train_model(parse_words(TrainerConfig, words), QUIET)  # the same command resumes
    train_model(parse_words(TrainerConfig, [str(path)]), QUIET)
    with pytest.raises(CourseError, match="holds a run that was not continued from"):
        train_model(parse_words(TrainerConfig, [str(path), f"continue_from={tmp_path / 'there/run'}"]), QUIET)


def test_a_run_cannot_be_continued_from_nothing_from_damage_or_otherwise_than_asked(tmp_path, prepared, short):
    def start(source, *words):
        path = settings_file(tmp_path / "new", prepared, **PLAIN | {"steps": 4})
        train_model(parse_words(TrainerConfig, [str(path), f"continue_from={source}", *words]), QUIET)

    with pytest.raises(CourseError, match="continue_from is .*, which is no run with a checkpoint"):
        start(tmp_path / "nowhere")
    with pytest.raises(CourseError, match=r"steps \(4 there, 8 here\).*continue_with=steps"):
        start(short / "run", "steps=8")
    shutil.copytree(short / "run", tmp_path / "damaged")
    newest = tmp_path / "damaged/checkpoints/step-00000004"
    (newest / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CourseError, match="step-00000004 is damaged"):
        start(newest)
    assert not (tmp_path / "new/run/checkpoints").exists()
    start(tmp_path / "damaged")
    assert changes_of(tmp_path / "new/run")[0].source.endswith("step-00000003"), "the newest that is intact"


def test_words_that_continue_a_run_say_so_where_there_is_none(tmp_path, prepared):
    path, output = settings_file(tmp_path, prepared, **PLAIN | {"steps": 1}), StringIO()
    config = parse_words(TrainerConfig, [str(path), "continue_with=steps"])
    line = f"{tmp_path / 'run'} holds no checkpoint to continue: the run begins at step 0, and continue_with=steps has no effect.\n"
    train_model(config, Console(file=output))
    assert output.getvalue().count(line) == 1
    train_model(config, Console(file=output))
    assert output.getvalue().count(line) == 1, "the second time there is a run"
    fresh = parse_words(TrainerConfig, [str(path), f"engine.output={tmp_path / 'fresh'}"])
    assert nothing_to_continue(fresh) == [], "who does not ask to continue is told nothing"


def test_a_copy_has_runs_of_its_own_in_trackers(tmp_path, prepared):
    path = settings_file(tmp_path / "one", prepared, **PLAIN | {"steps": 2})
    words = ["engine.trackers=[mlflow]", f"engine.mlflow_uri=sqlite:///{tmp_path / 'mlflow.db'}"]
    train_model(parse_words(TrainerConfig, [str(path), *words]), QUIET)
    other = settings_file(tmp_path / "other", prepared, **PLAIN | {"steps": 4})
    train_model(parse_words(TrainerConfig, [str(other), *words, f"continue_from={tmp_path / 'one/run'}", "continue_with=steps"]), QUIET)
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(found) == 2 and {each.info.status for each in found} == {"FINISHED"}


STOPPING = """
from shared.course.errors import CourseError
from shared.engine.callbacks import Callback


class Stop(Callback):
    def on_step(self, engine):
        if engine.step == 5:
            raise CourseError("It goes wrong in step 5.")
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimizer.to_adamw=[nothing*]", "continue_with=optimizer,steps"], "nothing"),  # when the optimizer is built
        (["engine.checkpoint.resume=false", "continue_with=steps"], "holds checkpoints of another run"),  # when it takes the checkpoint
    ],
)
def test_a_copy_whose_run_is_refused_is_removed_again(tmp_path, prepared, short, words, sentence):
    def start(folder):
        path = settings_file(folder, prepared, **PLAIN | {"steps": 8})
        with pytest.raises(CourseError, match=sentence):
            train_model(parse_words(TrainerConfig, [str(path), f"continue_from={short / 'run'}", *words]), QUIET)

    start(tmp_path / "new")
    assert not (tmp_path / "new/run").exists()
    (tmp_path / "other/run").mkdir(parents=True)
    (tmp_path / "other/run/notes.txt").write_text("mine")
    start(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other/run").iterdir()] == ["notes.txt"]


def test_a_copy_that_trained_stays_where_it_goes_wrong_later(tmp_path, prepared, short):
    (tmp_path / "stopping.py").write_text(STOPPING)
    path = settings_file(tmp_path, prepared, **PLAIN | {"steps": 8})
    words = [f"continue_from={short / 'run'}", "continue_with=steps", f"engine.callbacks=['{tmp_path / 'stopping.py'}:Stop']"]
    with pytest.raises(CourseError, match="wrong in step 5"):
        train_model(parse_words(TrainerConfig, [str(path), *words]), QUIET)
    assert changes_of(tmp_path / "run")[0].source.endswith("step-00000004")
    assert [each.name for each in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000004"]


def test_a_run_whose_first_model_was_trained_further_goes_on_from_that_model_written_again(tmp_path, prepared):
    """As the refusal says: the run that wrote it is continued elsewhere from the checkpoint of that step."""

    def start(folder, *words):
        path = settings_file(tmp_path / folder, prepared, **PLAIN | {"report": PLAIN["report"] | {"export": True}})
        train_model(parse_words(TrainerConfig, [str(path), *words]), QUIET)

    start("first", "steps=4")
    start("second", "steps=2", f"start_from={tmp_path / 'first/run'}")
    start("first", "steps=6", "continue_with=steps")
    on = ["steps=3", "continue_with=steps"]
    with pytest.raises(CourseError, match="own command with `steps=N continue_from=.*` writes the model of step N again"):
        start("second", *on, f"start_from={tmp_path / 'first/run'}")
    start("again", "steps=4", "continue_with=steps", f"continue_from={tmp_path / 'first/run/checkpoints/step-00000004'}")
    start("second", *on, f"start_from={tmp_path / 'again/run'}")
    assert max(rates_of(tmp_path / "second/run")) == 3
