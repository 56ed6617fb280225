"""What the modes on preferences compare and ask: prompts with their system prompt, no prompts at all, the cache of a changed model."""

import pytest
from preferring_runs import preferring_config
from rich.console import Console
from tuned_runs import tuned_config

from shared.trainer.run import build, train_model

QUIET = Console(quiet=True)
PIPELINE = "parallel.pipeline_parallel=2 parallel.pipeline_chunks=2 parallel"


@pytest.mark.parametrize(("mode", "section"), [("ppo", "preferences"), ("dpo", "preferences"), ("sft", "chats")])
def test_held_out_prompts_begin_with_the_system_prompt_of_the_training(tmp_path, base, mode, section):
    words = [f"{section}.system=Be brief.", "preferences.made.file=null"][: 1 + (mode != "sft")]
    config = tuned_config(tmp_path, base, *words) if mode == "sft" else preferring_config(tmp_path, base, mode, *words)
    run = build(config, QUIET)
    asked, store = run.mode.prompts_of(run.mode.tasks), run.text.training
    shown = store.document(0).tolist()
    assert all("Be brief." in run.text.tokenizer.decode(prompt) for prompt in [*asked, shown])
    if mode == "ppo":
        prompt = run.mode.prompts[0]  # of the first pair
        trained = store.trained(0)
        assert shown[: len(prompt)] == list(prompt) and trained[len(prompt)] and not trained[: len(prompt)].any()


def test_a_run_without_held_out_prompts_reports_the_losses(tmp_path, base):
    config = preferring_config(tmp_path, base, "dpo", "preferences.made.prompts=0", "steps=2", "schedule.decay_steps=0")
    results = train_model(config, QUIET)
    assert not results.judged.preferred and "held-out pairs ranked right" in results.judged.summary


def test_a_report_that_is_written_again_has_the_last_rollout(tmp_path, base):
    config = preferring_config(tmp_path, base, "ppo", "steps=2", "schedule.decay_steps=0")
    first, again = (train_model(config, QUIET).judged.summary for _ in range(2))
    assert "last rollout's reward" in first and again.pop("starts of the run, whose seconds are added up") == 2
    assert first.keys() - again.keys() == {"attention"} and again.keys() < first.keys()  # which only a process that trains can count
    assert all(first[name] == again[name] for name in first if name.startswith("last rollout"))


def test_a_cached_reference_is_that_of_the_models_settings_and_of_the_precision(tmp_path, base):
    found = []
    for number, words in enumerate([[], ["model.rope_theta=300"], [], ["precision=bfloat16"]]):
        run = build(preferring_config(tmp_path / str(number), base, "dpo", *words), QUIET)
        run.mode.loaders(run.config, run.strategy)
        found.append(run.mode.text.training.reference(0).tolist())
    assert found[0] == found[2] and found[0] != found[1] and found[0] != found[3]


@pytest.mark.parametrize(
    ("mode", "words", "sentence"),
    [
        ("ppo", "data.held_out_rows=8", "data.held_out_rows has no effect with mode ppo, which has no held-out loss"),
        ("ppo", "data.epochs=2", "data.epochs has no effect with mode ppo, where steps alone"),
        ("ppo", "engine.evaluate_every=5", "engine.evaluate_every has no effect with mode ppo"),
        ("ppo", f"{PIPELINE}.pipeline_schedule=interleaved", "parallel.pipeline_schedule is interleaved, which takes a multiple"),
        ("dpo", "data.strategy=sequential", "data.strategy is sequential, and mode dpo packs whole answers"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, base, capsys, mode, words, sentence):
    with pytest.raises(SystemExit) as left:
        preferring_config(tmp_path, base, mode, *words.split())
    assert left.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())
