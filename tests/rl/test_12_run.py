"""Chapter 12's run as a reader uses it: it trains a start, learns from a verifier, leaves figures, and refuses bad options."""

import json
import random
import subprocess
from itertools import islice

import pytest
from command_lines import run_each
from scripts import refused, run_script

from chapters.checked_tasks import END, Sums, ids_of, reward_of, tasks_of, text_of
from shared.course.paths import CHECKOUT
from shared.preference.rollout import Sample
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


BAD = [
    (["--digits", "7"], "digits is 7: give 1 to 6"),
    (["--answers", "1"], "answers is 1"),
    (["--learning_rate", "0"], "learning_rate is 0"),
    (["--start_accuracy", "0.999", "--most_start_steps", "20"], "give fewer digits, a smaller start_accuracy or more most_start_steps"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return run_each(SCRIPT, [options for options, _ in BAD], tmp_path_factory.mktemp("refusals"), SMALL)


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_are_refused_in_a_sentence(refusals, options, words):
    assert refused(refusals[*options], words)


@pytest.mark.parametrize("task", ["sums", "counts", "functions"])
def test_no_held_out_task_is_trained_on(task):
    with tasks_of(task, 2, 3) as tasks:
        held_out = {tuple(each.prompt) for each in tasks.held_out}
        assert len(tasks.held_out) == (500 if task == "sums" else 200)
        assert not held_out & {tuple(each.prompt) for each in islice(tasks.others(), 5000)}
        assert [*islice(tasks.others(), 5)] == [*islice(tasks.others(), 5)], "each draw begins with the first"
    assert task == "sums" or len(held_out) == 200


@pytest.mark.parametrize("task", ["sums", "counts", "functions"])
def test_a_demonstration_passes_its_verifier_and_another_tasks_answer_does_not(task):
    with tasks_of(task, 3, 0) as tasks:
        some = [*islice(tasks.others(), 12)]
        texts = [tasks.text_of(each.answer) for each in some]
        assert tasks.judge(some, texts) == [1] * 12
        assert tasks.judge(some, [text + "?" for text in texts]) == [1.0 if task != "functions" else 0.0] * 12
        moved = [texts[-1], *texts[:-1]]
        assert tasks.judge(some, moved) == [float(said == text) for said, text in zip(moved, texts, strict=True)]
        assert max(len(each.answer) for each in some) + 1 < tasks.new_tokens
        assert max(len(each.prompt) for each in some) + tasks.new_tokens <= tasks.positions


def test_a_function_is_right_that_computes_the_same():
    with tasks_of("functions", 1, 0) as tasks:
        product = next(each for each in tasks.others() if "*" in tasks.text_of(each.answer))
        head, body = tasks.text_of(product.answer).split("return ")
        one, other = body.split(" * ")
        bodies = [f"return {other} * {one}", f"return {one} + {other}", "return 1 / 0", "", f"return {one} * 1j"]
        assert tasks.judge([product] * 5, [head + body for body in bodies]) == [1, 0, 0, 0, 0]


def test_texts_and_ids_are_each_others_inverse():
    draw, sums = random.Random(0), Sums(3, 0)
    for _ in range(20):
        pair = draw.randrange(1000), draw.randrange(1000)
        asked = sums.asked(pair)
        assert text_of(asked.prompt) == f"{pair[0]}+{pair[1]}="
        assert text_of([*asked.answer, END]) == f"{sum(pair)}."


def test_only_a_right_answer_that_ended_is_rewarded():
    sums = Sums(2, 0)
    training = [sums.asked((12, 30))]
    said = [("42", True), ("42", False), ("43", True), ("142", True), ("4", True), ("", True)]
    samples = [Sample(0, training[0].prompt, Completion(ids_of(text) + [END] * ended, [], ended)) for text, ended in said]
    assert reward_of(sums, training)(samples) == [1, 0, 0, 0, 0, 0]
