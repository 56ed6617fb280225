"""Answers that are empty, as files of Alpaca's kind and tables have them: refused by place in every mode, unless they are only read."""

import csv

import pytest

from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource, conversation_of, open_chats_of
from shared.preference.datasets import preference_of
from shared.rl.tasks import TasksConfig, task_of

ASKED, EMPTY, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": ""}, {"role": "assistant", "content": "a"}
CALL = EMPTY | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
CHATS = {
    "alpaca": ({"instruction": "q", "output": ""}, 2),
    "alpaca with a system prompt": ({"system": "S", "instruction": "q", "input": "", "output": " \n"}, 3),
    "history": ({"instruction": "q", "output": "a", "history": [["q", ""]]}, 2),
    "completion": ({"prompt": "q", "completion": ""}, 2),
    "messages": ({"messages": [ASKED, EMPTY]}, 2),
    "a list of texts": ({"messages": [ASKED, EMPTY | {"content": [{"type": "text", "text": " "}]}]}, 2),
    "sharegpt": ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]}, 2),
    "one of several turns": ({"messages": [ASKED, SAID, ASKED, EMPTY, ASKED, SAID]}, 4),
}


@pytest.mark.parametrize("name", CHATS)
def test_an_empty_answer_of_a_chat_is_refused_by_place(name):
    record, number = CHATS[name]
    with pytest.raises(CourseError, match=f"a.jsonl:7, message {number} is an empty answer, which teaches to say nothing .*: mend or"):
        conversation_of(record, "a.jsonl:7")


def test_an_empty_cell_of_a_table_is_refused_by_place(tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["instruction", "output"], ["q", "a"], ["q", ""]])
    with pytest.raises(CourseError, match="message 2 is an empty answer"):
        list(open_chats_of(ChatSource(str(tmp_path / "a.csv"))))


@pytest.mark.parametrize("answers", [[CALL], [EMPTY | {"reasoning_content": "Hm."}], [EMPTY | {"weight": 0}, ASKED, SAID]])
def test_calls_thoughts_and_answers_that_are_only_read_are_taken(answers):
    assert conversation_of({"messages": [ASKED, *answers]}, "a:1").is_trained(len(answers))


@pytest.mark.parametrize("name", ["chosen", "rejected", "completion"])
def test_an_empty_answer_of_a_pair_or_a_label_is_refused_by_place(name):
    record = {"prompt": "q", "chosen": "a", "rejected": "b"} if name != "completion" else {"prompt": "q", "label": True}
    for empty in ("", " ", [EMPTY]):
        with pytest.raises(CourseError, match=f"a.jsonl:7 has an empty answer in {name}: mend or remove it"):
            preference_of(record | {name: empty}, "a.jsonl:7")
    assert preference_of(record | {name: [CALL]}, "a.jsonl:7").answers


def test_an_empty_expected_answer_of_a_task_is_refused_by_place():
    with pytest.raises(CourseError, match="a.jsonl:7 has an empty answer, where a text is wanted"):
        task_of({"prompt": "q", "answer": ""}, "a.jsonl:7", TasksConfig(check="exact"))
