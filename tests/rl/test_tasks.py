"""Tasks with exact verifiers: what is made is right and held out, and what a reader brings is checked line by line."""

import json
import re
from dataclasses import replace
from itertools import islice

import pytest

from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource
from shared.rl.tasks import MadeTasks, TasksConfig, draw_tasks, open_tasks
from shared.rl.verifiers import VERIFIERS


SYSTEM, ASKED = {"role": "system", "content": "Give a number."}, {"role": "user", "content": "What is 2 plus 3?"}
SAID, THEN = {"role": "assistant", "content": "5"}, {"role": "user", "content": "And one more?"}


def written(tmp_path, *records) -> TasksConfig:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return TasksConfig(sources=(ChatSource(str(file)),), held_out=0)


def test_made_tasks_are_right():
    for task in open_tasks(TasksConfig(made=MadeTasks(training=300, digits=4))).training:
        if task.kind == "sum":
            one, other = map(int, re.findall(r"\d+", task.prompt))
            assert task.answer == str(one + other)
        elif task.kind == "count":
            assert task.answer == str(len(task.prompt.split(":")[1].split(",")))
        else:
            wanted = json.loads(task.answer)
            sign = {"sum": "+", "product": "*", "difference": "-"}[re.search(r"the (\w+) of", task.prompt)[1]]
            assert task.check == "code" and f"function {wanted['function']} " in task.prompt and len(wanted["cases"]) == 5
            assert all(value == eval(f"({one}) {sign} ({other})") for (one, other), value in wanted["cases"])


def test_formats_are_verified_exactly():
    for kind, check in (("list", "exact"), ("upper_case", "exact"), ("json", "json"), ("signature", "python")):
        training, held_out = open_tasks(TasksConfig(held_out=20, made=MadeTasks(kinds=(kind,), training=30)))
        assert {task.check for task in training} == {check}
        assert not {task.prompt for task in training} & {task.prompt for task in held_out}
        for one, other in zip(held_out, held_out[1:], strict=False):
            assert VERIFIERS[check](one.answer, one.answer) == 1 > VERIFIERS[check](other.answer, one.answer)


def test_a_set_depends_on_its_seed_and_its_sides_share_no_prompt():
    config = TasksConfig(held_out=60, made=MadeTasks(training=900))
    training, held_out = open_tasks(config)
    assert len(training) == 900 and len({task.prompt for task in held_out}) == len(held_out) == 60
    assert not {task.prompt for task in training} & {task.prompt for task in held_out}
    assert {task.kind for task in training} == {task.kind for task in held_out} == {"sum", "count", "function"}
    assert open_tasks(config) == (training, held_out) != open_tasks(replace(config, made=MadeTasks(training=900, seed=1)))


def test_more_held_out_tasks_than_there_are_is_said():
    with pytest.raises(CourseError, match="but .* held-out tasks with digits 1: ask for fewer"):
        list(islice(draw_tasks(MadeTasks(kinds=("sum",), digits=1), True), 60))


def test_tasks_of_ones_own(tmp_path):
    config = written(tmp_path, {"prompt": "6 times 7?", "answer": 42}, {"prompt": "Spell it.", "answer": "a b", "check": "exact"})
    first, second = open_tasks(config).training
    assert (first.answer, first.check, second.check) == ("42", "number", "exact")
    named = replace(written(tmp_path, {"question": "How many?", "answer": "Half of 144.\n#### 72"}), prompt_field="question")
    assert open_tasks(named).training[0].answer == "72"
    many = replace(written(tmp_path, *({"prompt": f"{n}?", "answer": str(n)} for n in range(200) for _ in range(2))), held_out=5)
    training, held_out = open_tasks(many)
    assert len(held_out) == 5 and not {task.prompt for task in training} & {task.prompt for task in held_out}


@pytest.mark.parametrize("as_json", [False, True])
def test_prompts_are_lists_of_messages_too(tmp_path, as_json):
    """As trl, oumi and verl write them; Parquet files hold such lists, and CSV files hold them as JSON."""
    told = [[SYSTEM, ASKED, SAID, THEN], [ASKED]]
    several, one = [json.dumps(messages) if as_json else messages for messages in told]
    marked = several if as_json else [several[0], *(message | {"weight": 1} for message in several[1:])]
    judged = {"style": "rule", "ground_truth": "5"}
    rows = {"prompt": marked, "answer": 6}, {"prompt": one, "reward_model": judged}, {"prompt": one, "answer": "7", "reward_model": judged}
    first, second, both = open_tasks(written(tmp_path, *rows)).training
    assert (first.prompt, first.answer) == ("Give a number.\n\nWhat is 2 plus 3?\n\n5\n\nAnd one more?", "6")
    assert first.asked("Answer briefly.") == told[0], "its own system prompt stays"
    assert (second.prompt, second.answer) == ("What is 2 plus 3?", "5") and both.answer == "7"
    assert second.asked() == [ASKED] and second.asked("Answer briefly.") == [{"role": "system", "content": "Answer briefly."}, ASKED]


@pytest.mark.parametrize(
    ("number", "written_out"), [(1e22, "1" + "0" * 22), (1e-7, "0.0000001"), (0.1, "0.1"), (2.0, "2.0"), (10**25, "1" + "0" * 25)]
)
def test_a_number_is_an_answer_with_all_its_digits(tmp_path, number, written_out):
    [task] = open_tasks(written(tmp_path, {"prompt": "p", "answer": number})).training
    assert task.answer == written_out


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "p"}, "mine.jsonl:2 has no answer, where a text is wanted .its fields are 'prompt'."),
        ({"prompt": " ", "answer": "1"}, "mine.jsonl:2 has an empty prompt, where a text is wanted"),
        ({"prompt": {"text": "p"}, "answer": "1"}, "mine.jsonl:2 has the dict .*'p'.* as prompt, where a text is wanted"),
        ({"prompt": [ASKED, SAID], "answer": "1"}, "mine.jsonl:2 has a prompt that ends with the role assistant, so"),
        ({"prompt": [ASKED, SYSTEM], "answer": "1"}, "mine.jsonl:2, message 2 has the role system and stands in the wrong"),
        ({"prompt": [{"role": "user", "content": ""}], "answer": "1"}, "mine.jsonl:2 has an empty prompt"),
        ({"prompt": [ASKED | {"name": "\ud800"}], "answer": "1"}, "mine.jsonl:2 holds what is no text, number or list of them"),
        ({"prompt": "p", "reward_model": {"style": "rule"}}, "mine.jsonl:2 has no answer"),
        ({"prompt": "p", "answer": None}, "mine.jsonl:2 has no answer"),
        ({"prompt": "p", "answer": "seven"}, "mine.jsonl:2 has an answer that does not pass its own check, number: 'seven'"),
        ({"prompt": "p", "answer": "7", "check": "luck"}, "mine.jsonl:2 has the check 'luck'"),
        ({"prompt": "p", "answer": "{", "check": "json"}, "does not pass its own check, json"),
        ({"prompt": "p", "answer": "{}", "check": "code"}, "does not pass its own check, code"),
        ([1], "mine.jsonl:2 is not a record with fields"),
    ],
)
def test_bad_records_are_named_by_their_place(tmp_path, record, said):
    with pytest.raises(CourseError, match=said):
        open_tasks(written(tmp_path, {"prompt": "p", "answer": "1"}, record))


def test_sets_without_tasks_are_refused(tmp_path):
    with pytest.raises(CourseError, match="holds no tasks to train on"):
        open_tasks(written(tmp_path))
    with pytest.raises(CourseError, match="is held out, about one in twelve is"):
        open_tasks(replace(written(tmp_path, {"prompt": "3?", "answer": "3"}), held_out=1))
    with pytest.raises(ValueError, match="check is luck: choose"):
        TasksConfig(check="luck")
    with pytest.raises(ValueError, match="at least one kind"):
        MadeTasks(kinds=())


# What is right, by math-verify and the corrections of its readings: expected, answer, verdict.
PAIRS = [
    ("1/2", "0.5", 1), ("\\frac{1}{2}", "The answer is 1/2.", 1), ("\\sqrt{2}/2", "$\\frac{1}{\\sqrt{2}}$", 1), ("1000", "1,000", 1),
    ("{1,2,3}", "$\\{3,1,2\\}$", 1), ("x=3", "3", 1), ("72", "#### 72", 1), ("72", "\\boxed{72}", 1), ("72", "It is 72 km.", 1),
    ("72", "71", 0), ("72", "", 0), ("72", "seven", 0), ("1/3", "0.333", 0), ("0.5", "50%", 1), ("50", "50%", 1),
    ("[0,1)", "$0\\le x<1$", 0),
    ("2x+1", "$1+2x$", 1), ("2x+1", "$2x$", 0), ("\\pi", "$3.14159$", 0), ("(1,2)", "$(1,2)$", 1), ("-3", "$-3$", 1), ("-3", "3", 0),
    ("A", "A", 1), ("A", "B", 0), ("10", "\\boxed{1} and \\boxed{10}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "answer", "verdict"), PAIRS)
def test_mathematical_answers(expected, answer, verdict):
    assert VERIFIERS["math"](answer, expected) == verdict


def test_math_and_number_agree_on_plain_numbers():
    numbers = ["0", "7", "-7", "3/4", "0.75", "1,234", "1234", "-0.5", "-1/2", "12.50", "25/2"]
    for one in numbers:
        for other in numbers:
            assert VERIFIERS["math"](one, other) == VERIFIERS["number"](one, other), (one, other)


def test_an_expected_answer_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="is nothing that math-verify reads"):
        VERIFIERS["math"]("3", "$$")
