"""The study of GRPO as a reader starts it, made so small that it shows nothing but that it runs."""

import json
from importlib import import_module

import pytest

from shared.course.errors import CourseError

study = import_module("chapters.12_grpo.grpo_study")
SMALL = {"seeds": 1, "digits": 1, "width": 16, "layers": 1, "start_accuracy": 0.0, "steps": 2, "coin_steps": 2, "prompts": 2, "answers": 2}


def test_every_kind_of_run_begins_with_the_same_start_and_the_page_says_what_was_found(tmp_path):
    config = study.StudyConfig(**SMALL, output=tmp_path)
    study.run(config)
    found = {entry["variant"]: entry["figures"] for entry in json.loads((tmp_path / "study.json").read_text())}
    assert found.keys() == study.VARIANTS.keys()
    start = found["the start"]
    assert start["KL to the start, nats"] == 0 and start["pass@1"] <= start["pass@16"]
    assert all(figures["KL to the start, nats"] != 0 for name, figures in found.items() if name != "the start")
    page = (tmp_path / "LEARNING.md").read_text()
    for name, figures in found.items():
        assert f"| {name} | {figures['greedy']:.3f} | {figures['pass@1']:.3f} |" in page
        assert name == "the start" or f"- {name}: {100 * (figures['pass@1'] - start['pass@1']):+.1f} points" in page
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "study.json").read_bytes()
    study.run(config)
    assert (tmp_path / "study.json").read_bytes() == before, "what is done is not done again"


@pytest.mark.parametrize("task", ["counts", "functions"])
def test_other_tasks_take_the_same_way(task, tmp_path):
    study.run(study.StudyConfig(**SMALL | {"task": task}, output=tmp_path))
    page = (tmp_path / "LEARNING.md").read_text()
    assert f"## Held-out {task} that are right" in page and "- GRPO, random reward: " in page


def test_the_random_reward_asks_nobody(tmp_path, monkeypatch):
    from chapters import checked_run

    asked = []
    monkeypatch.setattr(checked_run, "reward_of", lambda tasks, training: lambda samples: [asked.append(1) or 0.0 for _ in samples])
    settings = {name: value for name, value in SMALL.items() if name not in ("seeds", "coin_steps")}
    monkeypatch.setattr(study, "measured", lambda *given: {})
    study.trial(tmp_path, settings | {"taught by": "coin"}, 0)
    assert not asked
    study.trial(tmp_path, settings | {"taught by": "verifier"}, 0)
    assert len(asked) == 4


def test_the_random_reward_has_steps_of_its_own(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(study, "trial", lambda output, given, seed: seen.update({given["taught by"]: given["steps"]}) or {"x": 0.0})
    monkeypatch.setattr(study, "page", lambda config, results: "")
    monkeypatch.setattr(study, "draw", lambda *given: None)
    study.run(study.StudyConfig(seeds=1, steps=7, coin_steps=3, output=tmp_path))
    assert seen == {"nothing": 7, "verifier": 7, "coin": 3, "imitation": 7}


def test_sizes_of_the_study_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(CourseError, match="seeds is 0: give at least 1"):
        study.run(study.StudyConfig(seeds=0, output=tmp_path))
    with pytest.raises(ValueError, match="width is 20: give a multiple of 8"):
        study.StudyConfig(width=20)
