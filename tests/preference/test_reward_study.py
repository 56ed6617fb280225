"""The study of reward models as a reader starts it, made so small that it shows nothing but that it runs; and the pairs that it draws."""

import json
from importlib import import_module

import pytest
import torch

from shared.course.errors import CourseError

study = import_module("chapters.11_preferences.reward_study")


def names_right(ids: torch.Tensor) -> bool:
    return (ids[1:] == ids[0] + study.FACTS).any().item()


def test_right_answers_are_preferred_as_often_and_as_long_as_said():
    for longer, flipped in ((0.0, 0.0), (1.0, 0.0), (0.9, 0.25)):
        batch = study.draw_pairs(2000, torch.Generator().manual_seed(3), longer, flipped)
        first_is_right, right_is_longer, same = 0, 0, 0
        for ids, documents in zip(batch["input_ids"], batch["documents"], strict=True):
            sides = [ids[documents == number] for number in (0, 1)]
            assert all(side[-1] == study.END and 3 <= len(side) <= study.SEQ for side in sides)
            right, wrong = sides if names_right(sides[0]) else sides[::-1]
            assert names_right(right) and not names_right(wrong) and right[0] == wrong[0]
            first_is_right += right is sides[0]
            right_is_longer += len(right) > len(wrong)
            same += len(right) == len(wrong)
        assert abs(first_is_right / 2000 - (1 - flipped)) < 0.04
        assert abs(right_is_longer / (2000 - same) - longer) < 0.04 and 0.1 < same / 2000 < 0.2


def test_the_study_prints_and_draws_its_results(tmp_path, capsys, monkeypatch):
    few = {name: each for name, each in study.VARIANTS.items() if each["pairs"] == 400 and each["longer"] in (0.5, 0.9)}
    for name, value in {"VARIANTS": few, "AMOUNTS": (400,), "LONGER": (0.5, 0.9)}.items():
        monkeypatch.setattr(study, name, value)
    study.run(study.StudyConfig(seeds=1, steps=4, batch_size=2, held_out=5, output=tmp_path))
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [entry["variant"] for entry in kept] == list(study.VARIANTS)
    assert all(0 <= entry["figures"]["accuracy"] <= 1 for entry in kept)
    for plot in ("pairs.png", "lengths.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert "reward of a word" in " ".join(capsys.readouterr().out.split())


def test_settings_out_of_range_are_named(tmp_path):
    with pytest.raises(CourseError, match="steps is 3: give at least 4"):
        study.run(study.StudyConfig(steps=3, output=tmp_path))
