"""Extend a run: bit for bit the long one where the schedule allows it, after kills, in every mode, in another layout, by command."""

import shutil

import pytest
import torch
from preferring_runs import preferring_config
from retuned_runs import PLAIN, QUIET, equal, rates_of, weights_at
from safetensors.torch import load_file
from trainer_runs import settings_file, train
from tuned_runs import tuned_config

from shared.course.errors import CourseError
from shared.engine.checkpoint.folder import Checkpoints
from shared.parallel.comm.threads import run_threads
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.records import history
from shared.trainer.records.history import changes_of
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words


@pytest.fixture
def run(tmp_path, prepared):
    """run(folder, *words, **changes) trains there; every step of it is kept."""

    def start(folder, *words, **changes):
        keep = {"engine": {"checkpoint": {"every": 1, "keep_last": 99}, "log_every": 1}}
        path = settings_file(tmp_path / folder, prepared, **PLAIN | keep | changes)
        return train_model(parse_words(TrainerConfig, [str(path), *words]), QUIET)

    return start


def test_with_a_constant_rate_an_extended_run_is_the_long_one_bit_for_bit(tmp_path, run):
    """With dropout: random numbers, the place in the data and the optimizer's state are all carried over."""
    run("long", "steps=8")
    run("run", "steps=4")
    results = run("run", "steps=8", "continue_with=steps")
    assert equal(weights_at(tmp_path / "long/run", 8), weights_at(tmp_path / "run/run", 8))
    assert [(change.step, change.settings) for change in results.changes] == [(4, {"steps": [4, 8]})]


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear"])
def test_where_the_schedule_has_an_end_the_extended_run_differs_by_the_decay_that_it_made_and_the_long_one_did_not(tmp_path, run, name):
    """The steps before differ where cosine's and linear's decay depends on the length; wsd's begins late, and a run that is continued from
    before it is the long one bit for bit."""
    schedule = {"schedule": {"name": name, "warmup_steps": 1, "decay_steps": 2}}
    run("long", "steps=8", **schedule)
    run("run", "steps=4", **schedule)
    short, rates = rates_of(tmp_path / "run/run"), rates_of(tmp_path / "long/run")
    run("run", "steps=8", "continue_with=steps", **schedule)
    extended = rates_of(tmp_path / "run/run")
    assert {step: rate for step, rate in extended.items() if step > 4} == {step: rate for step, rate in rates.items() if step > 4}
    assert {step: rate for step, rate in extended.items() if step <= 4} == short
    same = [step for step in short if short[step] == rates[step]]
    assert same == {"wsd": [1, 2], "cosine": [1], "linear": [1]}[name]
    assert not equal(weights_at(tmp_path / "long/run", 8), weights_at(tmp_path / "run/run", 8))
    before = tmp_path / "run/run/checkpoints" / f"step-{same[-1]:08d}"
    run("before", "steps=8", f"continue_from={before}", "continue_with=steps", **schedule)
    assert equal(weights_at(tmp_path / "long/run", 8), weights_at(tmp_path / "before/run", 8))


def test_an_extended_run_that_is_killed_resumes_bit_for_bit_with_and_without_the_words(tmp_path, run):
    changed = {"optimizer": {"lr": 0.01, "name": "adamw"}, "data": {"micro_batch_size": 1}}
    run("run", "steps=4")
    run("whole", "steps=4")
    words = ["steps=8", "continue_with=steps,optimizer"]
    run("whole", *words, **changed)
    for after, again in ((4, words), (6, ["steps=8"])):
        run("run", *(words if after == 4 else again), **changed)
        for step in Checkpoints(tmp_path / "run/run/checkpoints").steps():  # as if killed after this step, without its report
            if step > after:
                shutil.rmtree(Checkpoints(tmp_path / "run/run/checkpoints").path(step))
        results = run("run", *again, **changed)
        assert equal(weights_at(tmp_path / "whole/run", 8), weights_at(tmp_path / "run/run", 8))
        assert [change.step for change in results.changes] == [4], "recorded once"
        assert provenance.saved_value(tmp_path / "run/run", "continue_with") == [], "the words hold for one command"


def test_a_kill_between_the_history_and_the_record_writes_the_change_once(tmp_path, run):
    run("run", "steps=4")
    record = (tmp_path / "run/run/config.yaml").read_bytes()
    run("run", "steps=6", "continue_with=steps")
    for step in (5, 6):
        shutil.rmtree(Checkpoints(tmp_path / "run/run/checkpoints").path(step))
    (tmp_path / "run/run/config.yaml").write_bytes(record)
    results = run("run", "steps=6", "continue_with=steps")
    assert len(history.events_of(tmp_path / "run/run")) == 2 and len(results.changes) == 1

# Every mode, every layout, the command line.


MODES = {"sft": [], "reward": [], "dpo": ["dpo.beta=0.3"], "ppo": ["ppo.clip=0.3"], "grpo": ["grpo.clip_high=0.3"]}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if mode == "ppo" else pytest.mark.slow) for mode in MODES])
def test_every_mode_is_extended_bit_for_bit_retuned_and_continued_elsewhere(tmp_path, base, mode):
    """A rollout is open at step 3 of ppo and grpo: the extended run goes on within it."""
    still = ["schedule.name=constant", "schedule.warmup_steps=0", "engine.checkpoint.every=1", "engine.checkpoint.keep_last=99"]

    def config(folder, *words):
        words = (*still, *words)
        return tuned_config(tmp_path / folder, base, *words) if mode == "sft" else preferring_config(tmp_path / folder, base, mode, *words)

    train_model(config("long", "steps=6"), QUIET)
    train_model(config("run", "steps=3"), QUIET)
    shutil.copytree(tmp_path / "run/run", tmp_path / "retuned/run")
    with pytest.raises(CourseError, match="continue_with=steps"):
        train_model(config("run", "steps=6"), QUIET)
    train_model(config("run", "steps=6", "continue_with=steps"), QUIET)
    assert equal(weights_at(tmp_path / "long/run", 6), weights_at(tmp_path / "run/run", 6))
    names = ",".join(["steps", "optimizer.lr", *(word.split("=")[0] for word in MODES[mode])])
    train_model(config("retuned", "steps=6", "optimizer.lr=0.01", *MODES[mode], f"continue_with={names}"), QUIET)
    assert not equal(weights_at(tmp_path / "long/run", 6), weights_at(tmp_path / "retuned/run", 6))
    source = tmp_path / "run/run/checkpoints/step-00000003"
    train_model(config("copy", "steps=6", f"continue_from={source}", "continue_with=steps"), QUIET)
    assert equal(weights_at(tmp_path / "long/run", 6), weights_at(tmp_path / "copy/run", 6))


def test_a_run_is_extended_and_retuned_in_another_layout(tmp_path, prepared):
    """On two ranks from one process's checkpoint, and back, without dropout: what one process trains, but for rounding."""
    still = {**PLAIN, "model": {"hidden_dropout": 0.0}, "optimizer": {"name": "sgd", "lr": 0.2}}

    def config(folder, *words):
        path = settings_file(tmp_path / folder, prepared, **still)
        return parse_words(TrainerConfig, [str(path), "engine.checkpoint.every=1", *words])

    later = ["steps=4", "optimizer.lr=0.1", "continue_with=steps,optimizer.lr"]
    train_model(config("alone", "steps=2"), QUIET)
    shutil.copytree(tmp_path / "alone/run", tmp_path / "two/run")
    train_model(config("alone", *later), QUIET)
    two = config("two", *later, "parallel.fully_sharded=2")
    run_threads(lambda world: train_model(two, QUIET, world), 2)
    assert [change.settings.keys() for change in changes_of(tmp_path / "two/run")] == [{"optimizer.lr", "steps"}]
    for folder in ("alone", "two"):  # whole files, by one process that goes one step further
        train_model(config(folder, "steps=5", "optimizer.lr=0.1", "continue_with=steps"), QUIET)
    one, other = (load_file(tmp_path / folder / "run/checkpoints/step-00000005/weights.safetensors") for folder in ("alone", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)


def test_the_words_work_from_the_command_line(tmp_path, prepared):
    path = settings_file(tmp_path, prepared, **PLAIN)
    assert train(path, "steps=2").returncode == 0
    refused = train(path, "steps=3")
    assert refused.returncode == 1 and "steps (2 there, 3 here)" in refused.stderr and "Traceback" not in refused.stderr
    done = train(path, "steps=3", "continue_with=steps")
    assert done.returncode == 0 and "Continued after step 2 with steps 3 (2 before)." in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["wsd", "cosine"])
def test_lengths_that_the_trainer_scaled_are_its_own_to_scale_again(tmp_path, run, name):
    """Shortened by words, extended by words, in place and in another folder, and to the file's own length."""
    schedule = {"steps": 40, "schedule": {"name": name, "warmup_steps": 10, "decay_steps": 30}, "optimizer": {"name": "sgd"}}
    run("run", "steps=4", **schedule)
    source = tmp_path / "run/run"
    shutil.copytree(tmp_path / "run", tmp_path / "edited")
    config = settings_file(tmp_path / "copy", tmp_path / "none", **PLAIN | schedule)
    longer = parse_words(TrainerConfig, [str(config), "steps=8", f"continue_from={source}", "continue_with=steps"])
    scaled = ["schedule.warmup_steps", "schedule.decay_steps"][: 2 if name == "wsd" else 1]
    assert longer.continue_with == ["steps", *scaled]
    results = run("run", "steps=5", "continue_with=optimizer.lr,steps", "optimizer.lr=0.01", **schedule)
    expected = {"optimizer.lr": [0.02, 0.01], "steps": [4, 5], "schedule.warmup_steps": [1, 5 * 10 // 40]}
    expected |= {"schedule.decay_steps": [3, 5 * 30 // 40]} if name == "wsd" else {}
    assert results.changes[0].settings == {key: values for key, values in expected.items() if values[0] != values[1]}
    whole = parse_words(TrainerConfig, [str(tmp_path / "run/tiny.yaml"), "optimizer.lr=0.01", "continue_with=steps"])
    assert whole.steps == 40 and whole.continue_with == ["steps", *scaled]
    with pytest.raises(CourseError, match="schedule.warmup_steps .1 there, 5 here"):  # which somebody wrote
        run("edited", "steps=8", "schedule.warmup_steps=5", "schedule.decay_steps=2", "continue_with=steps", **schedule)
    with pytest.raises(CourseError, match="schedule.warmup_steps .1 there, 4 here"):
        run("edited", "steps=8", "continue_with=steps", **schedule | {"schedule": {"name": name, "warmup_steps": 20, "decay_steps": 20}})
