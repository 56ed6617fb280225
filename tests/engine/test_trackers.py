"""Every tracker receives the same metrics, read back with its own reader, and a resumed run goes on in the same place.

One run logs steps 1, 2, 4 and 6, is saved at 4, and breaks in 7. Another goes on from 4 with other data, so that its step 6 has other
values: a file must show the second step 6, a service that cannot forget the first, and nobody both.
"""

import json
import math
import re
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from runs import Loader, Recorder, make_engine, printed
from tracker_readers import in_32_bits, mlflow_metrics, tensorboard_metrics, wandb_parts

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback
from shared.engine.config import EngineConfig
from shared.engine.trackers import TRACKERS, make_tracker
from shared.engine.trackers.services import settings_of
from shared.engine.trackers.jsonl import read_jsonl, to_json

ASKED = []  # host names that something in this process wanted to know the address of, since it was last cleared


def note_lookups(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        ASKED.append(arguments[0])


sys.addaudithook(note_lookups)


class Odd(Callback):
    """Metrics that break careless writers: NaN, very small, very large, whole."""

    def measure(self, engine):
        return {"odd/nan": math.nan, "odd/small": 1.2345678901234567e-300, "odd/large": 1.5e300, "odd/whole": engine.step}


class Break(Callback):
    def __init__(self, at: int):
        self.at = at

    def on_step(self, engine):
        if engine.step == self.at:
            raise RuntimeError("the power went out")


class OtherLoader(Loader):
    def load_state_dict(self, state):
        self.step = state["step"] + 500


def callbacks(*more):
    return [make_tracker(name) for name in ("jsonl", "tensorboard", "wandb", "mlflow")] + [Odd(), *more]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    first, second = Recorder(), Recorder()
    ASKED.clear()  # other tests of this process ask for machines
    with pytest.raises(RuntimeError, match="power"):
        make_engine(folder, callbacks(first, Break(7)), every=4).fit(Loader(), steps=8)
    statuses = [mlflow_metrics(folder)[1].info.status]
    between = sorted(path.name for path in folder.iterdir())
    make_engine(folder, callbacks(second, Break(0)), every=4).fit(OtherLoader(), steps=8)
    assert list(first.logs) == [1, 2, 4, 6] and list(second.logs) == [6, 8]
    assert first.logs[6]["train/loss"] != second.logs[6]["train/loss"], "the negative control: nothing else tells the two step 6 apart"
    return SimpleNamespace(folder=folder, first=first.logs, second=second.logs, statuses=statuses, between=between, asked=[*ASKED])


def same(found, expected):
    """Equal to the last bit, with NaN equal to NaN."""
    assert {step: to_json(metrics) for step, metrics in found.items()} == {step: to_json(metrics) for step, metrics in expected.items()}


def forgetting(run):
    return {step: run.first[step] for step in (1, 2, 4)} | run.second


def keeping(run):
    return run.first | {8: run.second[8]}


def test_the_lines_file_holds_the_figures_and_is_cut_at_the_resume(run):
    same(read_jsonl(run.folder / "metrics.jsonl"), forgetting(run))
    steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 4, 6, 8]


def test_tensorboard_holds_the_figures_and_drops_the_steps_after_the_resume(run):
    found, reader = tensorboard_metrics(run.folder)
    same(found, in_32_bits(forgetting(run)))
    [text, *_] = reader.Tensors("settings/text_summary")
    assert "| engine.log_every | 2 |" in text.tensor_proto.string_val[0].decode()


def test_wandb_holds_the_figures_of_one_run_in_two_parts(run):
    (first_id, first), (second_id, second) = wandb_parts(run.folder)
    assert first_id == second_id and first_id
    assert not set(first) & set(second)
    same(first | second, keeping(run))


def test_mlflow_holds_the_figures_of_one_run(run):
    found, stored = mlflow_metrics(run.folder)
    same(found, keeping(run))
    assert stored.data.params["engine.checkpoint.every"] == "4"
    assert run.statuses + [stored.info.status] == ["FAILED", "FINISHED"]


@pytest.mark.parametrize("reason, status", [("SIGTERM", "KILLED"), ("SIGINT", "KILLED"), ("validation/loss has not improved", "FINISHED")])
def test_a_run_that_was_asked_to_leave_is_killed_in_mlflow_and_one_that_stopped_early_has_finished(tmp_path, reason, status):
    class Leave(Callback):
        def on_step(self, engine):
            engine.stop(reason)

    make_engine(tmp_path, [make_tracker("mlflow"), Leave()], every=4).fit(Loader(), steps=8)
    assert mlflow_metrics(tmp_path)[1].info.status == status


def test_no_tracker_looked_for_another_machine(run):
    assert not [host for host in run.asked if host not in ("localhost", "127.0.0.1", None)]


def test_trackers_write_into_the_runs_folder_only(run):
    assert {"metrics.jsonl", "tensorboard", "wandb", "mlflow.db", "checkpoints"} <= set(run.between)


def test_a_new_run_in_an_old_folder_moves_the_lines_aside(tmp_path):
    for loss in ("one", "two", "three"):
        tracker = make_tracker("jsonl")
        engine = SimpleNamespace(output=tmp_path, step=0)
        tracker.on_start(engine)
        engine.step = 5
        tracker.on_log(engine, {"train/loss": float(len(loss))})
        tracker.on_end(engine)
    kept = {path.name: read_jsonl(path)[5]["train/loss"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 3.0, "metrics.2.jsonl": 3.0, "metrics.jsonl": 5.0}


def test_a_line_that_a_killed_run_left_half_written_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "train/loss": 1.5}\n{"step": 4, "train/lo')
    assert read_jsonl(path) == {2: {"train/loss": 1.5}}
    tracker, engine = make_tracker("jsonl"), SimpleNamespace(output=tmp_path, step=3)
    tracker.on_start(engine)
    engine.step = 4
    tracker.on_log(engine, {"train/loss": -math.inf})
    tracker.on_log(engine, {"validation/loss": 2.0})  # the last evaluation may log a step again, with other metrics
    tracker.on_end(engine)
    assert read_jsonl(path) == {2: {"train/loss": 1.5}, 4: {"train/loss": -math.inf, "validation/loss": 2.0}}


def test_without_a_terminal_each_log_is_a_line(tmp_path):
    recorder = Recorder()
    engine = make_engine(tmp_path, [make_tracker("console"), recorder]).fit(Loader(), steps=4)
    lines = [line for line in printed(engine).splitlines() if line.startswith("step")]
    assert lines == [f"step {step} of 4   loss {recorder.logs[step]['train/loss']:.3f}" for step in (1, 2, 4)]


def test_the_progress_bar_of_a_terminal_shows_the_runs_step(tmp_path):
    for steps in (2, 6):  # the second goes on from step 2
        console = Console(file=StringIO(), force_terminal=True, width=160)
        recorder = Recorder()
        make_engine(tmp_path, [make_tracker("console"), recorder], console=console).fit(Loader(), steps=steps)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
        assert f"{steps}/{steps}" in text and f"loss {recorder.logs[steps]['train/loss']:.3f}" in text
    assert "2/6" in text and "0/6" not in text


def test_what_is_shown_can_be_chosen():
    console = Console(file=StringIO(), width=100)
    tracker = make_tracker("console", show={"odd/whole": "{:.0f} apples"})
    engine = SimpleNamespace(console=console, step=3, steps=30)
    tracker.on_start(engine)
    tracker.on_log(engine, {"odd/whole": 4.0, "train/loss": 1.0})
    assert console.file.getvalue() == "step  3 of 30   4 apples\n"


def test_unknown_names_and_options_are_answered_in_a_sentence():
    with pytest.raises(CourseError, match="There is no tracker 'tensorbord': choose console, .*Did you mean 'tensorboard'"):
        make_tracker("tensorbord")
    with pytest.raises(CourseError, match="'jsonl' cannot be made with the options colour"):
        make_tracker("jsonl", colour="red")
    assert {name: type(make_tracker(name)) for name in TRACKERS} == TRACKERS


MISSING = [("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("tensorboard", "tensorboard")]


@pytest.mark.parametrize(("name", "module"), MISSING)
def test_a_missing_package_is_one_sentence_and_training_goes_on(name, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    recorder = Recorder()
    said = printed(make_engine(tmp_path, [make_tracker(name), recorder]).fit(Loader(), steps=2))
    assert (
        re.search("is set aside.*needs the package .* `make install GROUP=trackers`, or leave the tracker out", said)
        and said.count("set aside") == 1
    )
    assert list(recorder.logs) == [1, 2]


def test_trackers_that_are_not_used_cost_no_import():
    code = "import sys, shared.engine.trackers; print({'wandb', 'mlflow', 'tensorboard', 'sqlalchemy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "set()"


def test_settings_are_flat_and_plain():
    nested = {"model": {"sizes": {"hidden": 8}, "layers": (1, 2)}, "seed": 0, "resume": True, "uri": None}
    found = settings_of(SimpleNamespace(config=EngineConfig(log_every=7)), nested)
    assert found["engine.log_every"] == 7 and found["engine.output"] == "runs/engine"
    more = {name: value for name, value in found.items() if not name.startswith("engine.")}
    assert more == {"model.sizes.hidden": 8, "model.layers": "(1, 2)", "seed": 0, "resume": True, "uri": None}
