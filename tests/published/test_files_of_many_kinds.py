"""Conversations that were right before and stay so: lines of every editor, pairs with tools, prompts longer than a row."""

import json

import pytest
from tool_records import OSLO, SAID, WEATHER

from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource, open_chats_of
from shared.finetune.chat.encoding import ChatExamples
from shared.finetune.chat.prepare import ChatConfig, chat_tokenizer, prepare_chats
from shared.preference.datasets import preference_of
from tests.support import chat_templates

ROWS = [{"messages": [{"role": "user", "content": f"{letter}a{letter}"}, {"role": "assistant", "content": f"b{letter}c"}]}
        for letter in "\u2028\u2029\u0085\x0b\x0c\x1c\r"]  # fmt: skip
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
FILES = {
    "lines.jsonl": "\n".join(LINES),
    "windows.jsonl": "\r\n".join([*LINES, ""]),
    "gaps.jsonl": "\n\n".join(LINES),
    "lines.json": "\n".join(LINES),
    "pretty.json": json.dumps(ROWS, indent=2, ensure_ascii=False),
}


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", FILES)
def test_lines_of_every_editor_hold_the_same_conversations(name, mark, tmp_path):
    """Unicode's line separators stand within texts; a byte order mark may stand before them."""
    (tmp_path / name).write_bytes((mark + FILES[name]).encode())
    assert [each.messages for each in open_chats_of(ChatSource(str(tmp_path / name)))] == [row["messages"] for row in ROWS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = chat_templates.save_tokenizer(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(chat_templates.QWEN_TOOLS, encoding="utf-8")
    return folder


def test_a_pair_with_tools_has_the_ids_of_transformers(model):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    answers = {"chosen": OSLO[1:] + SAID, "rejected": [{"role": "assistant", "content": "No."}]}
    pair = preference_of({"prompt": OSLO[:1], **answers, "tools": [WEATHER]}, "pairs.jsonl:1")
    made = ChatExamples(*chat_tokenizer(model, None), 1000)(pair.answers)
    for example, answer in zip(made, answers.values(), strict=True):
        wanted = theirs.apply_chat_template([*OSLO[:1], *answer], tools=[WEATHER], return_dict=False)
        assert example.ids.tolist() == wanted[: example.length] and theirs.decode(wanted[example.length :]) == "\n"


def test_conversations_whose_answers_a_row_cannot_hold_are_counted_and_a_file_of_them_is_refused(model, tmp_path):
    long = {"messages": [{"role": "user", "content": "x " * 200}, *SAID]}
    short = [{"messages": [{"role": "user", "content": f"{number}?"}, *SAID]} for number in range(4)]

    def prepared(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return prepare_chats(ChatConfig((ChatSource(str(tmp_path / "rows.jsonl")),), None, model, held_out_share=0.5), tmp_path / "out", 60)

    report = prepared([long, *short, long]).report
    assert (report.dropped, report.examples + report.held_out) == (2, 4)
    with pytest.raises(CourseError, match="of 2, each has its first answer after the row's 60 tokens"):
        prepared([long, long])
