"""The mode grpo as a user starts it: its report, resumed runs, layouts that train what one process trains, and what it refuses."""

import json

import pytest
import torch
from preferring_runs import preferring_config, trained, went_on
from rich.console import Console

from shared.course.errors import CourseError
from shared.model.counting import parameter_counts
from shared.preference import rollouts
from shared.rl import advantages as group_relative
from shared.trainer.modes import grpo as mode
from shared.trainer.planner.memory import memory_needed
from shared.trainer.run import train_model

QUIET = Console(quiet=True)
VARIANT = [
    "grpo.aggregation=sequence", "grpo.level=sequence", "grpo.kl_coefficient=0.1", "grpo.rounds=3", "grpo.mask_truncated=true",
]  # fmt: skip


def test_a_run_reports_tasks_pass_at_k_curves_and_why_its_loss_is_0(tmp_path, base, monkeypatch):
    caches, choose = [], rollouts.gathers_once
    monkeypatch.setattr(rollouts, "gathers_once", lambda strategy, asked, cache: caches.append(cache) or choose(strategy, asked, cache))
    config = preferring_config(tmp_path, base, "grpo", "model.hidden_dropout=0.0", "grpo.aggregation=sequence", "grpo.minibatches=1",
                               "grpo.tasks.made.kinds=[sum,function]", "grpo.tasks.made.digits=2")  # fmt: skip
    asked, find = [], mode.alarms
    monkeypatch.setattr(mode, "alarms", lambda *given: asked.append(given) or find(*given))
    results = train_model(config, QUIET)
    assert asked[0][1:] == (config.grpo.temperature,) and asked[-1][1:] == (config.grpo.temperature, results.judged.summary[
        "held-out tasks right before"])  # fmt: skip
    assert caches and min(caches) > 0, "what the sampler holds counts where weights are gathered"
    summary, first = results.judged.summary, results.metrics[1]
    for when in ("before", "after"):
        assert {f"held-out tasks right {when}", f"held-out pass@1 {when}", f"held-out pass@4 {when}"} <= summary.keys()
    assert len(results.judged.answered) == 5 and "alarms" in summary
    assert first["train/loss"] == pytest.approx(0, abs=1e-5) and first["norm/gradient"] > 1e-3
    assert f"gradient norm {first['norm/gradient']:.4f}" in summary["why the loss says little"]
    assert first["rollout/kl_to_reference"] == pytest.approx(0, abs=1e-5) and first["rollout/sampler_ratio"] == pytest.approx(1, abs=1e-3)
    drawn = {path.stem for path in (config.engine.output / "figures").iterdir()}
    assert {"reward", "kl", "length", "clip_fraction", "entropy", "zero_variance", "reward_parts", "pass_at_k"} <= drawn
    assert "why the loss says little" in results.report.read_text()
    assert "answered" in json.loads((config.engine.output / "results.json").read_text())


LEARNING = [
    "model.hidden_dropout=0.0", "grpo.prompts=8", "grpo.answers=6", "grpo.passes=1", "steps=16", "schedule.warmup_steps=0",
    "schedule.decay_steps=0", "optimizer.name=adamw", "optimizer.lr=0.005", "grpo.tasks.held_out=0", "report.export=false",
    "engine.checkpoint.every=99", "grpo.rewards=[{name: format, pattern: '[^e]*'}]",
]  # fmt: skip


def rewards_of(folder, base, seed: int) -> list[float]:
    metrics = train_model(preferring_config(folder, base, "grpo", *LEARNING, f"seed={seed}"), QUIET).metrics
    return [metrics[step]["rollout/reward"] for step in range(1, 17, 2)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_its_reward_rises_and_not_with_the_advantages_of_other_answers(tmp_path, base, seed, monkeypatch):
    """Answers without an e, which are a third at first."""
    rewards = rewards_of(tmp_path / "right", base, seed)
    assert rewards[-1] > rewards[0] + 0.4
    right = group_relative.group_advantages
    monkeypatch.setattr(group_relative, "group_advantages", lambda *given: right(*given).reshape(-1, 6).roll(1, dims=1).flatten())
    shuffled = rewards_of(tmp_path / "wrong", base, seed)
    assert shuffled[0] == rewards[0] and shuffled[-1] < rewards[0] + 0.25


@pytest.mark.parametrize(
    ("words", "after"),
    [
        pytest.param([], 2, id="within a rollout"),
        pytest.param(VARIANT, 4, id="between two"),
        pytest.param(["adapter.rank=4", "grpo.reference=false"], 2, id="adapter", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, base, words, after):
    config = preferring_config(tmp_path, base, "grpo", *words)
    train_model(config, QUIET)
    whole, again = went_on(config, after)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("layout", ["dp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp2", "tp2", "pp2", "dp2_zero1"))])
def test_layouts_train_what_one_process_trains(tmp_path, base, layout):
    alone, found = (trained(tmp_path, base, "grpo", each) for each in ("", layout))
    assert found.keys() == alone.keys()
    for name, weight in alone.items():
        assert (found[name] - weight).norm() <= 2e-5 * weight.norm() + 1e-7, name


def test_a_reward_of_ones_own_that_fails_is_named_and_ends_the_run_or_counts_as_was_said(tmp_path, base):
    file = tmp_path / "mine.py"
    file.write_text("def shaky(prompt, answer, expected):\n    raise RuntimeError('no idea')\n")
    words = [f"grpo.rewards=[{{name: '{file}:shaky'}}]", "steps=2", "schedule.decay_steps=0"]
    with pytest.raises(CourseError, match=r"The reward .*mine.py:shaky failed on the prompt 'What is .*no idea"):
        train_model(preferring_config(tmp_path / "ends", base, "grpo", *words), QUIET)
    with pytest.warns(UserWarning, match="It counts as -1.0"):
        results = train_model(preferring_config(tmp_path / "counts", base, "grpo", *words, "grpo.reward_failed=-1"), QUIET)
    assert results.metrics[1]["rollout/reward"] == -1 and "In 100% of the groups" in results.judged.summary["alarms"]


def test_a_reward_of_ones_own_that_is_for_no_task_trains_nothing_and_is_said(tmp_path, base):
    file = tmp_path / "mine.py"
    file.write_text("def other(prompt, answer, expected):\n    return None\n")
    words = [f"grpo.rewards=[{{name: '{file}:other'}}]", "steps=2", "schedule.decay_steps=0", "grpo.tasks.held_out=0"]
    config = preferring_config(tmp_path, base, "grpo", *words, "grpo.reward_failed=-1")
    results = train_model(config, QUIET)
    first = results.metrics[1]
    assert first["rollout/without_reward"] == 1 and first["norm/gradient"] == 0 and first["rollout/reward/failed"] == 0
    assert "No reward applies to 100% of the answers" in results.judged.summary["alarms"]
    assert "NaN" not in (config.engine.output / "results.json").read_text()


def test_the_memory_estimate_counts_a_reference_that_is_kept_beside(tmp_path, base):
    def needed(*words: str) -> float:
        return memory_needed(preferring_config(tmp_path, base, "grpo", *words))

    weights = 4 * sum(parameter_counts(preferring_config(tmp_path, base, "grpo").model).values())
    assert needed() - needed("grpo.reference=false") == pytest.approx(weights)
    assert needed("adapter.rank=4") == pytest.approx(needed("adapter.rank=4", "grpo.reference=false"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["start_from=null"], "mode is grpo and start_from is null"),
        (["ppo.clip=0.3"], "the section ppo is for mode ppo"),
        (["mode=ppo"], "the section grpo is for mode grpo"),
        (["chats.sources=[{path: a.jsonl}]"], "chats.sources are conversations, for mode sft: give grpo.tasks"),
        (["instructions.examples=5"], "the section instructions is for mode sft: give grpo.tasks"),
        (["preferences.held_out_share=0.1"], "the section preferences is for mode reward or dpo or ppo"),
        (["grpo.answers=1"], "grpo.answers is 1"),
        (["grpo.level=word"], "grpo.level is 'word'"),
        (["grpo.kl_coefficient=0.1", "grpo.kl_estimator=k1"], "grpo.kl_estimator is k1, whose gradient in the loss is 0 on average"),
        (["grpo.kl_coefficient=0.1", "grpo.reference=false"], "give reference true, or kl_coefficient 0"),
        (["grpo.rewards=[]"], "rewards is empty"),
        (["grpo.rewards=[{name: task}, {name: task}]"], "names one reward twice"),
        (["grpo.overlong_tokens=3"], "overlong_tokens and overlong_penalty belong together"),
        (["data.epochs=2"], "data.epochs has no effect with mode grpo"),
        (["parallel.context_parallel=2"], "and mode grpo needs each answer whole"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, base, capsys, words, sentence):
    with pytest.raises(SystemExit) as left:
        preferring_config(tmp_path, base, "grpo", *words)
    assert left.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())


def test_a_reward_model_that_is_none_is_refused_by_the_settings_name(tmp_path, base):
    config = preferring_config(tmp_path, base, "grpo", f"grpo.rewards=[{{name: model, folder: '{base}'}}]")
    with pytest.raises(CourseError, match="grpo.rewards is .*, which is a language model"):
        train_model(config, QUIET)
