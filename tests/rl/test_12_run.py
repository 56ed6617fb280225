"""Chapter 12's run as a reader uses it: it trains a start, learns from a verifier, leaves figures, and refuses bad options."""

import json
import random
import subprocess

import pytest
from scripts import refused, run_script

from chapters.sums_run import END, SumsConfig, ids_of, prompt_of, reward_of_sums, sums_of, text_of
from shared.course.paths import CHECKOUT
from shared.preference.answer_rows import Sample
from shared.preference.sampler import Completion

SCRIPT = CHECKOUT / "chapters" / "12_grpo" / "run.py"
SMALL = "--digits 1 --steps 4 --prompts 4 --answers 4 --start_accuracy 0.05".split()


def start(*options, cwd, **how) -> subprocess.CompletedProcess:
    return run_script(SCRIPT, *SMALL, *options, cwd=cwd, **how)


def test_a_run_leaves_figures_and_begins_again_from_its_start(tmp_path):
    first, second = start(cwd=tmp_path, fresh=True), start(cwd=tmp_path)
    assert "after" in first.stdout and "pass@16" in first.stdout and "parts are yours" in first.stdout
    assert "of held-out sums right after" in first.stdout and "of held-out sums right, from" in second.stdout
    figures = json.loads((tmp_path / "runs/12_grpo/figures.json").read_text())
    assert [step for step, _ in figures["held_out"]] == [0, 4] and len(figures["rollouts"]) == 2
    assert all(0 <= figures[when][f"pass@{k}"] <= 1 for when in ("before", "after") for k in (1, 16))
    assert figures["before"]["pass@1"] <= figures["before"]["pass@16"]
    assert (tmp_path / "runs/12_grpo/figures.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--digits", "7"], "digits is 7: give 1 to 6"),
        (["--answers", "1"], "answers is 1"),
        (["--learning_rate", "0"], "learning_rate is 0"),
        (["--start_accuracy", "0.999", "--most_start_steps", "20"], "give fewer digits, a smaller start_accuracy or more most_start_steps"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options, words, tmp_path):
    assert refused(start(*options, cwd=tmp_path), words)


def test_no_held_out_sum_is_trained_on():
    held_out, others = sums_of(SumsConfig(digits=2))
    assert len(held_out) == 500 and not set(held_out) & {next(others) for _ in range(5000)}


def test_texts_and_ids_are_each_others_inverse():
    draw = random.Random(0)
    for _ in range(20):
        pair = draw.randrange(1000), draw.randrange(1000)
        assert text_of(prompt_of(pair)) == f"{pair[0]}+{pair[1]}="
        assert text_of([*ids_of(str(sum(pair))), END]) == f"{sum(pair)}."


def test_only_a_right_answer_that_ended_is_rewarded():
    pairs = [(12, 30)]
    said = [("42", True), ("42", False), ("43", True), ("142", True), ("4", True), ("", True)]
    samples = [Sample(0, prompt_of(pairs[0]), Completion(ids_of(text) + [END] * ended, [], ended)) for text, ended in said]
    assert reward_of_sums(pairs)(samples) == [1, 0, 0, 0, 0, 0]
