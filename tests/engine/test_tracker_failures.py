"""A tracker that fails is named once and set aside: it never ends a training, and a resumed run takes it up again."""

import pytest
import torch
from runs import Loader, Recorder, make_engine, printed, weights
from tracker_readers import in_32_bits, mlflow_metrics, tensorboard_metrics, wandb_parts

from shared.course.errors import CourseError
from shared.engine.callbacks import FAILURES, Callback, metric_name
from shared.engine.trackers import TRACKERS, make_tracker
from shared.engine.trackers.jsonl import read_jsonl


class Flaky(Callback):
    """A tracker that keeps its lines under a run's id, and fails in one hook."""

    expendable = True

    def __init__(self, hook: str = "", error: Exception | None = None):
        self.hook, self.error, self.run_id, self.told = hook, error, None, []

    def fail(self, hook: str):
        self.told.append(hook)
        if hook == self.hook:
            raise self.error or RuntimeError("the [network] is\ngone")

    def on_start(self, engine):
        self.run_id = self.run_id or "a-run"
        self.fail("on_start")

    def on_log(self, engine, metrics):
        self.fail("on_log")

    def on_error(self, engine, error):
        self.fail("on_error")

    def on_end(self, engine):
        self.fail("on_end")

    def state_dict(self):
        return {"run_id": self.run_id}

    def load_state_dict(self, state):
        self.run_id = state["run_id"]


TOLD = {
    "on_start": ["on_start", "on_error", "on_end"],
    "on_log": ["on_start", "on_log", "on_error", "on_end"],
    "on_end": ["on_start", "on_log", "on_log", "on_log", "on_end", "on_error"],
}


@pytest.mark.parametrize("hook", TOLD)
def test_it_is_named_once_and_the_others_go_on(hook, tmp_path):
    flaky, recorder = Flaky(hook), Recorder()
    engine = make_engine(tmp_path, [flaky, recorder], every=2).fit(Loader(), steps=4)
    assert engine.step == 4 and list(recorder.logs) == [1, 2, 4] and flaky.told == TOLD[hook]
    [line] = [line for line in printed(engine).splitlines() if "Flaky" in line]
    assert "training continues without it: RuntimeError: the [network] is gone" in line
    assert "raise self.error" in (tmp_path / FAILURES).read_text()
    again = Flaky()
    make_engine(tmp_path, [again, Recorder()], every=2).fit(Loader(), steps=6)
    assert again.run_id == "a-run" and again.told == ["on_start", "on_log", "on_end"]


def test_the_weights_are_those_of_a_run_without_it(tmp_path):
    torch.manual_seed(0)
    alone = make_engine(tmp_path / "alone").fit(Loader(), steps=4)
    torch.manual_seed(0)
    watched = make_engine(tmp_path / "watched", [Flaky("on_log")]).fit(Loader(), steps=4)
    assert all(torch.equal(value, weights(watched)[name]) for name, value in weights(alone).items())


def test_a_second_call_of_fit_tries_it_again(tmp_path):
    flaky = Flaky("on_log")
    engine = make_engine(tmp_path, [flaky]).fit(Loader(), steps=2)
    flaky.hook = ""
    engine.fit(Loader(), steps=4)
    assert flaky.told[-3:] == ["on_start", "on_log", "on_end"] and printed(engine).count("set aside") == 1


def test_a_disk_and_a_terminal_that_take_nothing_do_not_end_the_run_either(tmp_path, monkeypatch):
    engine = make_engine(tmp_path, [Flaky("on_log")])

    def closed(*_, **__):
        raise BrokenPipeError("closed")

    (tmp_path / FAILURES).mkdir()
    monkeypatch.setattr(engine.console, "print", closed)
    assert engine.fit(Loader(), steps=2).step == 2


def test_one_that_fails_once_more_when_it_is_set_aside_does_not_end_the_run_either(tmp_path, monkeypatch):
    flaky = Flaky("on_log")
    monkeypatch.setattr(flaky, "on_error", lambda engine, error: 1 / 0)
    engine = make_engine(tmp_path, [flaky]).fit(Loader(), steps=2)
    assert engine.step == 2 and flaky.told[-1] == "on_end"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_failure_of_it_ends_the_run(error, tmp_path):
    with pytest.raises(type(error)):
        make_engine(tmp_path, [Flaky("on_log", error)]).fit(Loader(), steps=2)


def test_another_callback_that_fails_ends_the_run(tmp_path):
    flaky = Flaky("on_log")
    flaky.expendable = False
    with pytest.raises(RuntimeError, match="network"):
        make_engine(tmp_path, [flaky]).fit(Loader(), steps=2)


def test_a_sentence_is_shown_without_the_name_of_its_class(tmp_path):
    said = printed(make_engine(tmp_path, [Flaky("on_start", CourseError("Install it."))]).fit(Loader(), steps=2))
    assert "training continues without it: Install it." in said


def test_every_tracker_may_fail():
    assert all(tracker.expendable for tracker in TRACKERS.values()) and not Callback.expendable


def failing_at_6(tracker: Callback) -> Callback:
    log = tracker.on_log

    def on_log(engine, metrics):
        if engine.step == 6:
            raise ConnectionError("no route to host")
        log(engine, metrics)

    tracker.on_log = on_log
    return tracker


SERVICES = [pytest.param("wandb", marks=pytest.mark.slow), pytest.param("mlflow", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", ["jsonl", "tensorboard", *SERVICES])
def test_a_resumed_run_goes_on_in_the_same_place(name, tmp_path):
    """It fails at step 6 of 8, with a checkpoint at 4 and one at 8: what was logged in between is missing, and nothing stands twice."""
    recorder = Recorder()
    first = make_engine(tmp_path, [failing_at_6(make_tracker(name)), recorder], every=4).fit(Loader(), steps=8)
    assert printed(first).count("set aside; training continues without it: ConnectionError: no route to host") == 1
    second = make_engine(tmp_path, [make_tracker(name), recorder], every=4).fit(Loader(), steps=10)
    assert "set aside" not in printed(second)
    expected = {step: recorder.logs[step] for step in (1, 2, 4, 10)}
    if name == "jsonl":
        assert read_jsonl(tmp_path / "metrics.jsonl") == expected
    elif name == "tensorboard":
        assert tensorboard_metrics(tmp_path)[0] == in_32_bits(expected)
    elif name == "mlflow":
        found, run = mlflow_metrics(tmp_path)
        assert found == expected and run.info.status == "FINISHED"
    else:
        (first_id, before), (second_id, after) = wandb_parts(tmp_path)
        assert first_id == second_id and before | after == expected


@pytest.mark.parametrize(("hook", "status"), [("on_log", "FAILED"), ("on_end", "RUNNING")])
@pytest.mark.slow
def test_what_mlflow_keeps_of_an_incomplete_record_is_marked(hook, status, tmp_path, monkeypatch):
    tracker = make_tracker("mlflow")
    if hook == "on_log":
        failing_at_6(tracker)
    else:
        tracker.on_end = lambda engine: tracker.client.nothing()  # a bug of ours: named by its type, and it ends nothing
    engine = make_engine(tmp_path, [tracker]).fit(Loader(), steps=8)
    assert mlflow_metrics(tmp_path)[1].info.status == status
    assert hook == "on_log" or "AttributeError: 'MlflowClient' object has no attribute 'nothing'" in printed(engine)


def test_a_server_that_does_not_answer_holds_a_run_up_for_seconds(tmp_path, monkeypatch):
    """Nobody listens on port 9. With MLflow's own patience this takes four minutes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the course sets 3 where nobody else did
    engine = make_engine(tmp_path, [make_tracker("mlflow", uri="http://127.0.0.1:9")]).fit(Loader(), steps=2)
    assert engine.step == 2 and "MlflowTracker failed at step 0" in printed(engine) and "127.0.0.1" in printed(engine)


def test_wandb_that_lost_what_it_was_given_is_named(tmp_path):
    """Its helper process meets a full disk without a word; the file is shorter than what went into it."""
    file = tmp_path / "run.wandb"
    file.write_bytes(b":W&B")
    tracker = make_tracker("wandb")
    tracker.file, tracker.least_bytes = file, 4
    tracker.require_written()
    tracker.least_bytes = 5
    with pytest.raises(OSError, match="wrote 4 of at least 5 bytes into .*run.wandb: is the disk full"):
        tracker.require_written(patience=0.0)


@pytest.mark.parametrize("given", ["adamw, no decay", "blocks[0].weight", "größe", "a:b", "x  y"])
def test_names_of_metrics_are_what_every_tracker_takes(given):
    from mlflow.utils.validation import _validate_metric_name
    from torch.utils.tensorboard.summary import scalar

    name = metric_name(f"learning_rate/{given}")
    _validate_metric_name(name)
    assert scalar(name, 1.0).value[0].tag == name and name.isascii()
    assert metric_name("norm/gradient.embedding-1_2") == "norm/gradient.embedding-1_2"
