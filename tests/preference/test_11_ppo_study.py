"""The study of PPO as a reader starts it, made so small that it shows nothing but that it runs; and the task that it judges."""

import json
import random
from importlib import import_module

import pytest

from chapters.letters_task import END, FILLER, NEW_TOKENS, demonstration, gold_reward, letters_right, prompt_of
from shared.course.errors import CourseError

study = import_module("chapters.11_preferences.ppo_study")


def test_every_kind_of_run_starts_from_the_same_policy(tmp_path, monkeypatch):
    few = lambda variant: variant | {"pairs": 8 + variant["pairs"] // 1000} if "pairs" in variant else variant
    monkeypatch.setattr(study, "VARIANTS", {name: few(variant) for name, variant in study.VARIANTS.items()})
    config = study.StudyConfig(seeds=1, sft_steps=2, reward_steps=1, rollouts=1, output=tmp_path)
    study.run(config)
    found = {entry["variant"]: entry["figures"] for entry in json.loads((tmp_path / "study.json").read_text())}
    assert found.keys() == study.VARIANTS.keys()
    assert len({figures["gold reward before"] for figures in found.values()}) == 1
    for plot in ("overoptimisation.png", "rewards.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "study.json").read_bytes()
    study.run(config)
    assert (tmp_path / "study.json").read_bytes() == before, "what is done is not done again"


def test_rewards_of_the_task():
    prompt = [4, 2, 3, 1, 9]
    assert gold_reward(prompt, [1, 2, 3, 4]) == 1
    assert gold_reward(prompt, [1, 2, 4, 3]) == letters_right(prompt, [1, 2, 4, 3]) == 0.5
    assert gold_reward(prompt, [1, 2, 3, 4, FILLER, FILLER]) == pytest.approx(0.8)
    assert gold_reward(prompt, []) == 0


def test_demonstrations_fit_and_most_hold_a_mistake():
    draw = random.Random(0)
    made = [(prompt, demonstration(draw, prompt)) for prompt in (prompt_of(draw) for _ in range(500))]
    assert all(len(answer) <= NEW_TOKENS and answer.index(END) == len(answer) - 1 for _, answer in made)
    right = sum(gold_reward(prompt, answer[:-1]) == 1 for prompt, answer in made)
    assert 120 <= right < 200


def test_sizes_of_the_study_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(CourseError, match="rollouts is 0: give at least 1"):
        study.run(study.StudyConfig(rollouts=0, output=tmp_path))
