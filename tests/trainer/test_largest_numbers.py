"""Numbers of a user that become lists, processes or tensors: one that nothing has room for is a sentence, before any work."""

import re
import resource
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from shared.course.bounds import OutOfBounds
from shared.course.cli import cli
from shared.course.errors import SettingError
from shared.course.typed import configured
from shared.trainer.config import TrainerConfig
from shared.trainer.evaluation.tasks import EvalTask

HUGE = 10**12
SIZES = {  # the setting of a run -> the largest number that it takes
    "instructions.examples": 1_000_000,
    "preferences.made.pairs": 1_000_000,
    "grpo.tasks.made.training": 1_000_000,
    "grpo.tasks.held_out": 100_000,
    "grpo.held_out_answers": 10_000,
    "grpo.prompts": 100_000,
    "grpo.answers": 10_000,
    "grpo.rounds": 1_000,
    "ppo.prompts": 100_000,
    "ppo.answers": 10_000,
    "adapter.virtual_tokens": 100_000,
    "report.completions": 10_000,
    "data.prepare.vocab_size": 10_000_000,
    "data.prepare.sentinels": 100_000,
    "data.prepare.workers": 1_024,
}


@contextmanager
def in_memory(megabytes: float):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes * 1024


def settings_of(key: str, value: int) -> dict:
    settings = value
    for name in reversed(key.split(".")):
        settings = {name: settings}
    return settings


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("excess", [1, HUGE])
def test_a_size_of_a_run_has_a_bound(key, excess):
    value = SIZES[key] + excess
    with in_memory(64), pytest.raises(SettingError, match=rf"^{re.escape(key)} is {value}: give .*at most {SIZES[key]:,}"):
        configured(TrainerConfig, settings_of(key, value))


@pytest.mark.parametrize("mode", ["ppo", "grpo"])
def test_a_rollout_has_as_many_answers_as_fit_in_memory(mode):
    with pytest.raises(SettingError, match=r"A rollout has 100,000,000 answers \(prompts x answers\): give at most 1,000,000"):
        configured(TrainerConfig, {mode: {"prompts": 10_000, "answers": 10_000}})


@pytest.mark.parametrize(("name", "most"), [("samples", 10_000), ("shots", 1_000)])
def test_a_size_of_an_evaluation_has_a_bound(name, most):
    with pytest.raises(OutOfBounds, match=f"^{name} is {HUGE}: give at least 0 and at most {most:,}"):
        EvalTask("generate", prompt="a", answer="a", **{name: HUGE})


def test_samples_of_the_command_have_the_same_bound(tmp_path):
    done = CliRunner().invoke(cli, ["eval", str(tmp_path), "--samples", str(HUGE)])
    assert done.exit_code == 64 and "0<=x<=10000" in done.output
