"""The instruction set that is made by code: answers pass their own checks, and no held-out task occurs in training."""

import json
from itertools import islice

import pytest

from shared.course.errors import CourseError
from shared.finetune.instructions import MAKERS, Task, conversation, draw_tasks, read_tasks, write_instructions


def test_held_out_tasks_do_not_occur_in_training_and_every_kind_is_on_both_sides(tmp_path):
    conversations, tasks = write_instructions(tmp_path, examples=4000, tasks=120, seed=3)
    trained = {json.loads(line)["messages"][0]["content"] for line in conversations.read_text().splitlines()}
    held_out = read_tasks(tasks)
    assert len(held_out) == 120 == len({task.prompt for task in held_out}) and len({task.kind for task in held_out}) == len(MAKERS)
    assert not trained & {task.prompt for task in held_out} and len(trained) > 2000
    before = conversations.read_bytes(), tasks.read_bytes()
    assert write_instructions(tmp_path / "again", examples=4000, tasks=120, seed=3)[0].read_bytes() == before[0]
    assert write_instructions(tmp_path, examples=4000, tasks=120, seed=4)[1].read_bytes() != before[1]


def test_answers_pass_their_checks_and_others_do_not():
    tasks = list(islice(draw_tasks(0, False), 300))
    assert all(task.solved_by(task.answer) and task.solved_by(f" {task.answer}\n") for task in tasks)
    by_kind = {task.kind: task for task in tasks}
    assert not any(task.solved_by(other.answer) for kind, task in by_kind.items() for name, other in by_kind.items() if kind != name)
    assert conversation(tasks[0])["messages"][1] == {"role": "assistant", "content": tasks[0].answer}


@pytest.mark.parametrize(
    ("check", "wanted", "right", "wrong"),
    [
        ("number", "12", ["12", "It is 12.", "12, not 13"], ["13", "", "112", "1 2", "-12"]),
        ("json", '{"a": 1, "b": "c"}', ['{"b":"c","a":1}'], ['{"a": 1}', "{", "[" * 100_000]),
        ("python", "def f(x):\n    return x + 1", ["def f(x): return x + 1  # one"], ["def f(x): return 1 + x", "def f(", "\0", "("]),
        ("python", "def f(x):", ["def f(x):", "def f( x ):"], ["def f(x):\n    return x", "def f(x)", "def g(x):"]),
        ("exact", "- a\n- b", ["- a\n- b"], ["- a", "-a\n-b", "- A\n- b"]),
    ],
)
def test_what_counts_as_right(check, wanted, right, wrong):
    task = Task("kind", "prompt", wanted, check)
    assert all(task.solved_by(answer) for answer in right) and not any(task.solved_by(answer) for answer in wrong)


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "{", '{"kind": "a", "prompt": "b", "answer": "c", "check": "d"}', '{"kind": 1, "prompt": "b", "answer": "c", '
             '"check": "exact"}']
)  # fmt: skip
def test_a_line_that_is_no_task_is_named(tmp_path, line):
    good = json.dumps({"kind": "a", "prompt": "b", "answer": "c", "check": "exact"})
    (tmp_path / "tasks.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(CourseError, match="line 2, is no task"):
        read_tasks(tmp_path / "tasks.jsonl")
