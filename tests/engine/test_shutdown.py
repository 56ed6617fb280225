"""How a run ends: asked to, stopped by a callback, without data, with an error; and what is saved then."""

import signal
import subprocess
import sys
import threading

import pytest
import torch
from runs import Loader, Recorder, held_out, resumable_engine

from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.engine.callbacks import Callback
from shared.engine.stopping import EarlyStopping
from shared.engine.strategy import Strategy

SCRIPT = CHECKOUT / "tests" / "support" / "runs.py"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_callback_may_stop_the_run_which_is_saved_then(tmp_path, capsys):
    class Stop(Callback):
        def on_step(self, engine):
            if engine.step == 3:
                engine.stop("enough")

    engine = resumable_engine(tmp_path, [Stop()]).fit(Loader(), held_out(), steps=10)
    assert engine.step == 3 and engine.checkpoints.steps() == [3] and engine.evaluated_at == 3
    assert "Stopped after step 3 of 10: enough." in capsys.readouterr().out


def test_an_error_reaches_every_callback_and_the_caller(tmp_path):
    recorder = Recorder()

    class Break(Callback):
        def before_optimizer(self, engine):
            if engine.step == 2:
                raise RuntimeError("broken on purpose")

        def on_end(self, engine):
            raise KeyError("this one must not keep the others from closing")

    with pytest.raises((RuntimeError, KeyError)) as caught:
        resumable_engine(tmp_path, [Break(), recorder]).fit(Loader(), steps=10)
    assert recorder.hooks[-2:] == ["on_error", "on_end"]
    assert "broken on purpose" in str(caught.value.__context__ or caught.value)


def test_the_datas_end_is_a_sentence_that_counts_the_whole_run(tmp_path):
    resumable_engine(tmp_path).fit(Loader(limit=7), steps=5)
    with pytest.raises(CourseError, match="The data ended after 7 of 9 steps"):
        resumable_engine(tmp_path).fit(Loader(limit=7), steps=9)
    assert resumable_engine(tmp_path).checkpoints.steps()[-1] == 7, "what was trained is saved"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_request_to_leave_saves_and_leaves_between_two_steps(tmp_path, name):
    child = subprocess.Popen([sys.executable, SCRIPT, tmp_path, "100000"], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.strip() == "10":
            child.send_signal(getattr(signal, name))
            break
    rest = child.stdout.read().split("\n")
    assert child.wait() == 0 and rest[-2] == f"ended: {name}"
    done = int(next((line for line in reversed(rest) if line.isdigit()), 10))
    assert resumable_engine(tmp_path).checkpoints.steps()[-1] == done < 100_000  # how soon the signal comes is the machine's affair


def test_signals_are_as_before_afterwards(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    resumable_engine(tmp_path).fit(Loader(), steps=1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_engine_runs_on_a_thread_too(tmp_path):
    engine = resumable_engine(tmp_path)
    thread = threading.Thread(target=engine.fit, args=(Loader(),), kwargs={"steps": 2})
    thread.start()
    thread.join()
    assert engine.step == 2


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path):
    def run():
        engine = resumable_engine(tmp_path, [EarlyStopping(2, minimum_improvement=100.0)], evaluate_every=3)
        return engine.fit(Loader(), held_out(), steps=30)

    assert run().step == 9
    again = run()
    assert again.step == 9 and "has not fallen" in again.stopped


def test_a_finished_run_is_left_as_it_is(tmp_path):
    resumable_engine(tmp_path).fit(Loader(), held_out(), steps=4)
    recorder = Recorder()
    resumable_engine(tmp_path, [recorder]).fit(Loader(), held_out(), steps=4)
    assert recorder.hooks == ["on_start", "on_end"]


def test_a_run_may_be_interrupted_and_fitted_again(tmp_path, capsys):
    class Interrupt(Callback):
        def on_step(self, engine):
            if engine.step == 3:
                signal.raise_signal(signal.SIGINT)

    engine, loader = resumable_engine(tmp_path, [Interrupt()]), Loader()
    assert engine.fit(loader, steps=6).stopped == "SIGINT" and engine.step == 3
    assert "SIGINT: the step that runs is completed and saved. Ctrl-C once more ends at once" in capsys.readouterr().out
    assert engine.fit(loader, steps=6).stopped is None and engine.step == 6


def test_what_another_process_asks_for_stops_this_one_too(tmp_path):
    class Asked(Strategy):
        asked = 0

        def agree(self, reason):
            self.asked += 1
            return "the other one said so" if self.asked == 4 else reason  # once for the folder, then after each step

    engine = resumable_engine(tmp_path, strategy=Asked).fit(Loader(), steps=10)
    assert engine.step == 3 and engine.stopped == "the other one said so" and engine.checkpoints.steps() == [3]


def test_a_second_request_to_leave_ends_the_run_at_once(tmp_path):
    class Twice(Callback):
        def on_batch(self, engine, microbatches):
            if engine.step == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        resumable_engine(tmp_path, [Twice(), recorder]).fit(Loader(), steps=10)
    assert recorder.hooks[-2:] == ["on_error", "on_end"] and recorder.hooks.count("on_step") == 2
