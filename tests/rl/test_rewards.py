"""Rewards by name, their sum, and rewards that fail: named, never silently 0, and over within their time."""

import importlib.util
import json
import math
import re
import select
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest

from shared.course.errors import CourseError
from shared.finetune.instructions import Task
from shared.preference.rewards import reward_all
from shared.preference.rollout import Sample
from shared.preference.sampler import Completion
from shared.rl import reward_process
from shared.rl.code_reward import CodeReward
from shared.rl.reward_process import RewardProcess
from shared.rl.rewards import RewardPart, RewardSet
from shared.rl.tasks import MadeTasks, TasksConfig, open_tasks
from shared.rl.text_verifiers import TEXT_VERIFIERS

TASKS = [Task("sum", "3 + 4?", "7", "number"), Task("word", "Say yes.", "yes", "exact"), Task("code", "f?", "{}", "code")]
OWN = """
import sys, time

def brevity(prompt, answer, expected):
    print("rewards may print")
    return 1 - len(answer) / 10

def known(prompt, answer, expected):
    return {"3 + 4?7": 2}[prompt + expected]

def hangs(prompt, answer, expected):
    while answer == "hang":
        pass
    return True

def power(prompt, answer, expected):
    return len(str(9 ** 9 ** 9)) if answer == "hang" else 0.5

def nothing(prompt, answer, expected): return None
def text(prompt, answer, expected): return "good"
def nan(prompt, answer, expected): return float("nan")
def infinite(prompt, answer, expected): return float("inf") if expected == "yes" else 1
def beyond(prompt, answer, expected): return 1e39 if expected == "yes" else 1
def leaves(prompt, answer, expected): sys.exit(0)
def ends(prompt, answer, expected): return 1 if expected == "7" else __import__("os")._exit(0)
def two(prompt, answer): return 1.0
def light(prompt, answer, expected): return "torch" not in sys.modules
"""


class Runner:
    """Stands for the sandbox."""

    def judge(self, answers, tasks, share=False):
        if "broken" in answers:
            raise ValueError("no cases")
        return [0.75 if share else 0.25 for _ in answers]


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(OWN)
    return lambda name: f"{file}:{name}"


def sample(prompt: int, answer: str) -> Sample:
    return Sample(prompt, [1], Completion([*map(ord, answer), 0], [0.0] * (len(answer) + 1), True))


def rewards(*parts, **settings) -> RewardSet:
    parts = [part if isinstance(part, RewardPart) else RewardPart(part) for part in parts]
    return RewardSet(parts, TASKS, lambda ids: "".join(map(chr, ids)), **{"code": Runner()} | settings)


def test_a_share_of_the_cases_counts_where_it_is_asked_for_and_not_in_the_tasks_own_check():
    made = rewards("task", RewardPart("code", share=True))
    assert made([sample(2, "x")]) == [0.25 + 0.75]
    with pytest.raises(ValueError, match="The reward task has share"):
        RewardPart("task", share=True)


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_math_verify_is_imported_before_the_time_limit_runs():
    """Before a process says that it is ready. The calls after that import nothing."""
    program = r"""
import sys
from shared.rl import reward_process
judge = reward_process.function_of("math", None)
known = {*sys.modules}
assert judge("", r"$\frac{2}{\sqrt{2}}$", r"\sqrt{2}") == 1 and judge("", "7", "12") == 0
assert known == {*sys.modules}, {*sys.modules} - known
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_processes_of_rewards_import_no_torch_but_for_the_exercise(own):
    """So one that ended over a reward that hangs starts again in a fraction of a second, also beside `number`."""
    light = own("light")
    texts = [name for name in TEXT_VERIFIERS if name != "math" or importlib.util.find_spec("math_verify")]
    with closing(RewardProcess({**dict.fromkeys(texts), "format": "x", light: {}}, 60.0)) as process:
        assert process([*[(name, "", "{}", "{}") for name in texts if name not in ("near", "math")], (light, "", "", "")])[-1] == 1.0
    with closing(rewards("number", light)) as made:
        made([sample(0, "14/2")])
        assert made.parts == [{"number": 1.0, "light": 1.0}], "the exercise's number, not the first whole one"


def test_a_verifier_that_only_held_out_tasks_need_is_loaded_when_they_come():
    with closing(RewardSet([RewardPart()], TASKS[:1], str)) as made:
        assert [*made.verifiers.functions] == ["number"]
        assert made.judged([TASKS[1], TASKS[0]], ["yes", "7"]) == ([1.0, 1.0], [0.0, 0.0])


def test_each_part_has_its_curve_and_the_sum_its_weights(own):
    made = rewards("task", RewardPart("format", 0.5, r"\d+"), RewardPart(own("brevity"), -2.0))
    samples = [sample(0, "7"), sample(0, "is 7"), sample(1, " yes"), sample(2, "x")]
    assert made(samples) == pytest.approx([1.5 - 1.8, 1 - 1.2, 1 - 1.2, 0.25 - 1.8])
    assert made.parts[0] == {"task": 1.0, "format": 1.0, "brevity": pytest.approx(0.9)} and made.parts[2]["format"] == 0
    assert [each["task"] for each in made.parts] == [1, 1, 1, 0.25]


def test_a_function_of_ones_own_is_given_prompt_and_expected_answer(own):
    assert rewards(own("known"))([sample(0, "")]) == [2.0]


def test_a_function_that_returns_none_is_left_out_of_the_sum_and_is_no_failure(own):
    made = rewards("number", RewardPart(own("nothing"), 2.0), failed=-1.0)
    assert made([sample(0, "7"), sample(0, "8")]) == [1.0, 0.0]
    assert made.parts == [{"number": 1.0, "failed": 0.0}, {"number": 0.0, "failed": 0.0}]
    assert rewards(own("nothing"))([sample(0, "7")]) == [None]


def test_the_default_format_is_thoughts_and_an_answer():
    made = rewards("format")
    texts = ["<think>3 + 4\n= 7</think>\n<answer>7</answer>", "<think>7</think> 7", "<answer>7</answer>", ""]
    assert made([sample(0, text) for text in texts]) == [1, 0, 0, 0]


def test_an_answer_that_was_cut_off_keeps_its_last_token():
    cut = Sample(0, [1], Completion([ord("1"), ord("7")], [0.0] * 2, False))
    assert rewards("number")([cut, sample(0, "7")]) == [0.0, 1.0]


def test_a_reward_model_scores_samples_and_must_give_one_number_for_each(tmp_path):
    part = RewardPart("model", 2.0, folder=tmp_path)
    assert rewards("number", part, model=lambda samples: [3.0, -1.0])([sample(0, "7"), sample(0, "8")]) == [7.0, -2.0]
    with pytest.raises(CourseError, match="gave 1 numbers for 2 answers"):
        rewards(part, model=lambda samples: [3.0])([sample(0, "7"), sample(0, "8")])
    with pytest.raises(ValueError, match="were given none"):
        rewards(part)


def test_a_reward_model_that_gives_no_number_counts_as_what_was_chosen_too(tmp_path):
    part = RewardPart("model", 2.0, folder=tmp_path)
    samples, broken = [sample(0, "7"), sample(1, "no")], lambda samples: [3.0, math.nan]
    with pytest.raises(CourseError, match="reward model failed on the prompt 'Say yes.' and the answer 'no': it gave nan.*reward_failed"):
        rewards("task", part, model=broken)(samples)
    made = rewards("task", part, model=broken, failed=-1.0)
    with pytest.warns(UserWarning, match="reward model failed .* counts as -1.0"):
        assert made(samples) == [7.0, -2.0]
    assert [each["failed"] for each in made.parts] == [0, 1]
    made.model = lambda samples: 1 / 0
    with pytest.raises(CourseError, match="failed on answers to the prompts from 0 on: ZeroDivisionError"):
        made(samples)  # it says nothing of single answers


FAILURES = {
    "known": "KeyError: 'Say yes.yes'", "text": "could not convert string to float", "nan": "it gave nan",
    "leaves": "SystemExit: 0", "ends": "it ended the process",
    "hangs": "it took more than 60 seconds", "power": "it took more than 60 seconds",
}  # fmt: skip


@pytest.fixture
def minute(monkeypatch):
    """A minute of waiting for a reward is over once its process has computed for half a second: one that hangs costs no more, and one
    that answers is in time on a machine that does much else."""

    asked = []

    def receive(process, seconds, inner=RewardProcess.receive):
        asked[:] = [psutil.Process(process.process.pid), 0.5 if seconds <= 60 else seconds]  # its start is given longer
        return inner(process, seconds)

    def wait(read, written, failed, seconds, inner=select.select):
        computing, limit = asked[0].cpu_times, sum(asked[0].cpu_times()[:2]) + asked[1]
        while not (ready := inner(read, written, failed, 0.05))[0] and sum(computing()[:2]) < limit:
            pass
        return ready

    monkeypatch.setattr(RewardProcess, "receive", receive)
    monkeypatch.setattr(reward_process, "select", SimpleNamespace(select=wait))


def test_rewards_that_fail_count_as_what_was_chosen_or_end_the_run(own, minute):
    made = rewards("number", *map(own, FAILURES), seconds=60.0, failed=-1.0)
    with pytest.warns(UserWarning, match="counts as -1.0, and so do later ones") as warned:
        assert made([sample(1, "hang"), sample(0, "7")])[0] == -1.0 * len(FAILURES)
    for name, said in FAILURES.items():
        sentence = f"reward .*:{name} failed on the prompt 'Say yes.' and the answer 'hang': .*{said}"
        assert [bool(re.search(sentence, str(each.message))) for each in warned].count(True) == 1, name
    assert made.parts[0]["failed"] == made.parts[1]["failed"] == made.parts[1]["number"] == 1
    assert [made.parts[1][name] for name in ("known", "hangs", "power")] == [2.0, 1.0, 0.5]
    made.failed = None
    for name in ("nan", "hangs"):
        with pytest.raises(CourseError, match=f"reward .*:{name} failed on the prompt .*: {FAILURES[name]}.*\\. Mend it"):
            made.judged(TASKS[:1], ["hang"], own(name))


@pytest.mark.parametrize("name", ["hangs", "ends", "infinite", "beyond"])
def test_a_run_that_a_failed_reward_ends_asks_for_no_other_answer(own, minute, monkeypatch, name):
    """However many answers hang: one costs the time limit, and so does a rollout of them."""
    received, receive = [], RewardProcess.receive
    with closing(rewards("number", own(name), seconds=60.0)) as made:
        monkeypatch.setattr(RewardProcess, "receive", lambda *given: received.append(receive(*given)) or received[-1])
        with pytest.raises(CourseError, match=f"{name} failed on the prompt 'Say yes.' and the answer 'hang'.*Mend it"):
            made([sample(0, "7"), *[sample(1, "hang")] * 5])
        assert len(received) == 7 + 1, "six numbers, one of this reward, and its failure"
        assert received[:7] == [1, 0, 0, 0, 0, 0, True] and made.own.process is None
        assert made([sample(0, "7")]) == [2.0], "the next call starts the process anew"


def test_rewards_are_finite_in_float32_or_have_failed(own):
    made = rewards(own("beyond"), failed=-1.0)
    with pytest.warns(UserWarning, match=r"it gave 1e\+39, and a finite number is needed \(in float32\)"):
        assert made([sample(0, "7"), sample(1, "x")]) == [1.0, -1.0]

    def big(samples):
        return [1e38, -1e39]

    with pytest.raises(CourseError, match=r"big gave -1e\+39 for an answer to prompt 1: a finite number is needed \(in float32\)"):
        reward_all(big, [sample(0, "7"), sample(1, "x")])


def test_a_failing_verifier_and_failing_code_are_named():
    tasks = [Task("t", "p", "$$", "math")]
    made = RewardSet([RewardPart()], tasks, lambda ids: "".join(map(chr, ids)))
    with pytest.raises(CourseError, match="expected answer '.*' is nothing that math-verify reads"):
        made([sample(0, "3")])

    with pytest.raises(CourseError, match="reward task failed on the prompt 'f.' and the answer 'broken': ValueError: no cases"):
        rewards("task")([sample(2, "x"), sample(2, "broken")])


def test_made_functions_are_judged_by_running_them():
    tasks = open_tasks(TasksConfig(held_out=0, made=MadeTasks(kinds=("function", "sum"), training=4))).training
    name, sign = json.loads(tasks[0].answer)["function"], {"sum": "+", "product": "*", "difference": "-"}[tasks[0].prompt.split()[-5]]
    answers = [f"def {name}(x, y):\n    found = x {sign} y\n    return found", f"```python\n{name} = lambda x, y: y {sign} x + 1\n```"]
    with closing(CodeReward()) as code:
        made = RewardSet([RewardPart()], tasks, str, code=code)
        assert made.judged([tasks[0], tasks[0], tasks[1]], [*answers, tasks[1].answer])[0] == [1, 0, 1]


def test_other_tasks_are_judged_by_the_same_checks():
    assert rewards("format").judged([Task("t", "p", "1/2", "math"), TASKS[0]], ["0.5", "8"])[0] == [1, 0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("missing", r"function 'missing'\. Write it there, or name another"), ("brevty", r"Did you mean 'brevity'\? Give a function"),
        ("two", "too many positional arguments"), ("brevity", "No such file"),
    ],  # fmt: skip
)
def test_a_function_that_cannot_be_used_is_refused_before_work(own, tmp_path, function, said):
    name = own(function) if function != "brevity" else str(tmp_path / "other.py:brevity")
    with pytest.raises(CourseError, match=f"cannot be loaded: .*{said}"):
        rewards(name)


def test_a_reward_that_hangs_ends_without_the_process_that_asked(tmp_path):
    """As after a SIGKILL of the trainer, which cannot end it any more."""
    (tmp_path / "mine.py").write_text("def hang(prompt, answer, expected):\n    while True: pass\n")
    name = f"{tmp_path / 'mine.py'}:hang"
    lines = [json.dumps({"functions": {name: None}, "seconds": 0}), json.dumps([[name, "", "", ""]])]
    words = {"input": "\n".join(lines) + "\n", "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-m", reward_process.__name__], **words)
    assert done.returncode == 1 and done.stdout == "{}\n" and "in hang" in done.stderr


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for settings, said in [
        ({"name": "luck"}, "rewards names 'luck': choose task, format"), ({"weight": 0.0}, "weight of the reward task is 0.0"),
        ({"weight": math.nan}, "weight of the reward task is nan"), ({"name": "model"}, "give one to the reward model"),
        ({"pattern": "a"}, "has a pattern"), ({"name": "format", "pattern": "("}, "is no regular expression"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            RewardPart(**settings)
    with pytest.raises(CourseError, match="rewards names number, number: give at least one, and each once"):
        rewards("number", "number")
