"""The cases of chapter 10 as a reader starts them, made so small that they show nothing but that they run; and the second language."""

import json
from importlib import import_module

import pytest
from command_lines import run_each
from scripts import refused

from shared.course.paths import CHECKOUT
from shared.data.tokenizer import TextTokenizer
from shared.trainer.settings import read_settings

cases = import_module("chapters.10_finetuning.cases")
FOLDER = CHECKOUT / "chapters" / "10_finetuning"
TINY = {
    "domain": {"prose": ("What is a graph? " * 40, "A graph has nodes. " * 20), "mathematics code": ("x = x + 1\n" * 80, "y = x\n" * 60)},
    "language": {
        "first language": ("these are words here " * 40, "words are here " * 20),
        "second language": ("юб ц " * 99, "юб ц " * 50),
    },
}


@pytest.mark.parametrize("experiment", ["domain", "language"])
def test_a_case_prints_and_draws_its_results(tmp_path, capsys, monkeypatch, experiment):
    monkeypatch.setattr(cases, "texts_of", TINY.get)
    for cached in (cases.first_tokens, cases.stream, cases.first_weights):
        cached.cache_clear()
    small = {"first_steps": 3, "steps": 3, "seq": 8, "batch_size": 2, "vocab_size": 268, "new_tokens": 3, "characters": 200}
    config = cases.CaseConfig(experiment=experiment, seeds=1, **small, output=tmp_path)
    cases.run(config)
    kept = json.loads((tmp_path / f"{experiment}.json").read_text())
    assert [entry["variant"] for entry in kept] == list(cases.CASES[experiment])
    old, new = TINY[experiment]
    assert len({entry["figures"][f"{old}, before"] for entry in kept}) == 1, "every variant continues the same model"
    assert all(0 < entry["figures"][f"{name}, bits per character"] < 40 for entry in kept for name in (old, new))
    assert (tmp_path / f"{experiment}.png").read_bytes().startswith(b"\x89PNG") and "Lowest" in capsys.readouterr().out
    for cached in (cases.first_tokens, cases.stream, cases.first_weights):
        cached.cache_clear()


def test_the_second_language_has_other_letters_endings_and_order():
    assert cases.second_language("Graphs are Fine\nok") == "фуня юря грюпхсян\nэк"


def test_a_tokenizer_is_extended_and_used(tmp_path):
    TextTokenizer.train(["def f(x): return x\n" * 9], 300, sentinels=0).save_pretrained(tmp_path / "old", 64)
    (tmp_path / "text.txt").write_text("юбцд юбцд юбцд\n" * 20, encoding="utf-8")
    words = ["--tokenizer", "old", "--text", "text.txt", "--output", "new", "--new_tokens"]
    lines = [[*words, "5"], [*words, "0"], ["--tokenizer", "nowhere"]]
    done, none, nowhere = run_each(FOLDER / "extend_tokenizer.py", lines, tmp_path).values()
    assert done.returncode == 0 and "5 tokens added" in done.stdout, done.stderr
    assert TextTokenizer.load(tmp_path / "new").vocab_size == TextTokenizer.load(tmp_path / "old").vocab_size + 5
    assert refused(none, "new_tokens is 0: give at least 1") and refused(nowhere, "nowhere")


@pytest.mark.parametrize("name", ["domain", "language"])
def test_a_case_for_the_trainer_takes_its_model_from_any_folder(name):
    settings = read_settings(FOLDER / f"{name}.yaml")
    assert settings["start_from"] and "model" not in settings
