"""Pairs that are made by code: the judge prefers each chosen answer, no held-out prompt is trained on, and labels are switched as told."""

import json
from itertools import islice

import pytest

from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.instructions import Task, draw_tasks, read_tasks
from shared.preference.config import MOST_PROMPTS, MadeConfig
from shared.preference.datasets import open_preferences_of
from shared.preference.made_preferences import MAKERS, SCORES, Judge, draw_made, write_made
from shared.rl.examination import Compared
from shared.trainer.mode import Judged


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_judge_prefers_every_chosen_answer_and_no_prompt_is_on_both_sides(tmp_path):
    files = write_made(tmp_path, MadeConfig(pairs=2000, prompts=MOST_PROMPTS, seed=3))
    training, held_out = read_tasks(files.training, SCORES), read_tasks(files.held_out, SCORES)
    judge, pairs = Judge(training), read(files.pairs)
    assert len(pairs) == 2000 and len(list(open_preferences_of(ChatSource(str(files.pairs))))) == 2000
    assert all(judge(pair["prompt"], pair["chosen"]) == 1 > judge(pair["prompt"], pair["rejected"]) for pair in pairs)
    asked, kept = {pair["prompt"] for pair in pairs}, {task.prompt for task in held_out}
    assert asked == {task.prompt for task in training} and len(kept) == MOST_PROMPTS and not asked & kept
    assert len({task.kind for task in held_out}) == len({task.kind for task in training}) == len(MAKERS)
    longer = sum(len(pair["chosen"]) > len(pair["rejected"]) for pair in pairs) / len(pairs)
    assert 0.3 < longer < 0.7, "length alone does not give the preference away"


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    made = MadeConfig(pairs=100, prompts=20)
    files = [write_made(tmp_path / name, made) for name in ("a", "b")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    before = files[0].pairs.stat().st_mtime_ns
    assert write_made(tmp_path / "a", made) == files[0] and files[0].pairs.stat().st_mtime_ns == before
    other = write_made(tmp_path / "a", MadeConfig(pairs=100, prompts=20, seed=1))
    assert all(one.read_bytes() != two.read_bytes() for one, two in zip(files[0], other, strict=True))
    mine = write_made(tmp_path / "a", MadeConfig(pairs=100, prompts=20, file=tmp_path / "mine.jsonl"))
    assert mine.held_out == tmp_path / "mine.jsonl" and mine.pairs == files[0].pairs


def test_labels_are_switched_in_the_share_that_is_asked_for(tmp_path):
    whole, flipped = (read(write_made(tmp_path, MadeConfig(pairs=1000, flipped=share)).pairs) for share in (0.0, 0.3))
    switched = sum(one["chosen"] == two["rejected"] and one["rejected"] == two["chosen"] for one, two in zip(whole, flipped, strict=True))
    assert 250 < switched < 350 and switched + sum(one == two for one, two in zip(whole, flipped, strict=True)) == 1000


@pytest.mark.parametrize(
    ("check", "wanted", "rewards"),
    [
        ("near", "12", {"12": 1, "It is 12.": 1, "11": 0.5, "15": 0.25, "-12": 0.04, "twelve": 0, "9" * 5000: 0}),
        ("lines", "- a\n- b", {"- a\n- b": 1, " - a\n- b\n": 1, "- a": 0.5, "- a\n- b\n- b": 2 / 3, "A B": 0, "- b\n- a": 0, "": 0}),
        (
            "function",
            "def f(x, y):\n    return x + y",
            {
                "def f(x, y):\n    return x * y": 1,
                "def f(x, y):": 0.5,
                "def f(x, y):\n    return x": 0.5,
                "def f(x, y):\n    return": 0.5,
                "def f(x, y):\n    return (x +": 0.5,
                "def f(x, y):\n    x = y\n    return x": 0.75,
                "def f(x, y):\n    return x\ny": 0.5,
                "def g(x, y):\n    return x + y": 0,
                "def f(x, y):\n    \0": 0.5,
                "def f(x, y):\n    return " + "(" * 9000: 0.5,
                "": 0,
            },
        ),
        ("exact", "A B", {"A B": 1, "A": 0}),
    ],
)
def test_gold_rewards(check, wanted, rewards):
    judge = Judge([Task("kind", "What?", wanted, check)])
    assert {answer: pytest.approx(reward, abs=1e-8) for answer, reward in rewards.items()} == {
        answer: judge("What?", answer) for answer in rewards
    }


def test_the_win_rate_counts_a_tie_as_half():
    judge = Judge([Task("kind", f"{n}?", "5", "near") for n in range(4)])

    def win_rate(answers: list[str], others: list[str]) -> float:
        rewards = [(judge(f"{n}?", old), judge(f"{n}?", new)) for n, (new, old) in enumerate(zip(answers, others, strict=True))]
        [(_, _, _, _, won)] = Judged({}, preferred=[Compared("kind", "", "", "", "", *each) for each in rewards]).wins()
        return won

    assert win_rate(["5", "4", "9", "5"], ["4", "5", "9", "5"]) == 0.5
    assert win_rate(["5"] * 4, ["4", "3", "no", "5"]) == 3.5 / 4
    with pytest.raises(KeyError):
        judge("asked by nobody", "5")


def test_tasks_with_a_check_of_nobody_are_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"kind": "a", "prompt": "b", "answer": "c", "check": "lines"}\n')
    assert read_tasks(tmp_path / "mine.jsonl", SCORES)[0].check == "lines"
    with pytest.raises(CourseError, match="line 1, is no task: .* one of exact, number, json, python"):
        read_tasks(tmp_path / "mine.jsonl")


def test_prompts_are_not_those_that_the_model_was_fine_tuned_on():
    tuned = {task.prompt for task in islice(draw_tasks(0, False), 8000)}
    asked = {task.prompt for task, _ in islice(draw_made(0, True), 200)}
    assert not asked & tuned
