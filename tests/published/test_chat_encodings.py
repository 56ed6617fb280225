"""Records in one encoding and another: JSON text where a structure is expected, what Arrow makes of rows, and older formats of calls.

Parquet files and saved datasets are written by the library datasets.
"""

import json
from dataclasses import replace
from random import Random

import pytest
import random_chats
from datasets import load_dataset
from random_chats import written
from tool_records import OSLO, SAID, TWO_TOOLS, WEATHER, called, conversation

from shared.finetune.chat.datasets import ChatSource, open_chats_of
from shared.finetune.chat.encoding import ChatExamples
from shared.finetune.chat.messages import ChatError
from shared.finetune.chat.prepare import chat_tokenizer
from shared.finetune.chat.template import CHATML
from shared.preference.datasets import open_preferences_of
from tests.support import chat_templates


def conversations(path, kind="auto"):
    return [(each.messages, each.tools) for each in open_chats_of(ChatSource(str(path), kind))]


def test_the_nulls_that_arrow_puts_into_structs_are_in_no_text(tmp_path):
    lines, *others = written(tmp_path / "rows", TWO_TOOLS, mixed=False)
    assert "null" not in json.dumps(conversations(lines))
    for path in others:
        assert conversations(path) == conversations(lines), path


def test_a_null_that_json_says_stays():
    asked = [OSLO[0], called("weather", {"city": None}), *SAID]
    assert conversation({"messages": asked}).messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}


def test_mixed_fields_that_datasets_keeps_as_json_are_read_as_what_they_are(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": '"b"'}]},
    ]
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache"))
    read.save_to_disk(folder / "saved")
    read.to_parquet(folder / "rows.parquet")
    for path in (folder / "saved", folder / "rows.parquet"):
        assert conversations(path) == conversations(folder / "rows.jsonl")


ENCODED = {
    "arguments": [*OSLO[:1], called("weather", json.dumps({"city": "Oslo"})), OSLO[2], *SAID],
    "calls": [OSLO[0], OSLO[1] | {"tool_calls": json.dumps(OSLO[1]["tool_calls"])}, OSLO[2], *SAID],
    "messages": [json.dumps(message) for message in OSLO + SAID],
}


@pytest.mark.parametrize("name", ENCODED)
def test_json_text_is_a_structure_where_one_is_wanted(name):
    wanted = conversation({"messages": OSLO + SAID, "tools": [WEATHER]})
    assert conversation({"messages": ENCODED[name], "tools": [json.dumps(WEATHER)]}).messages == wanted.messages
    whole = conversation({"messages": json.dumps(ENCODED[name]), "tools": json.dumps([json.dumps(WEATHER)])})
    assert (whole.messages, whole.tools) == (wanted.messages, wanted.tools)


@pytest.mark.parametrize("arguments", ["", "null"])
def test_empty_arguments_are_none(arguments):
    found = conversation({"messages": [OSLO[0], called("now", arguments), *SAID]})
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


def test_a_program_as_arguments_stays_text():
    found = conversation({"messages": [OSLO[0], called("python", "print(1)"), *SAID]})
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == "print(1)"


def test_tools_that_are_no_json_are_refused():
    with pytest.raises(ChatError, match="has tools that are no list of mappings, nor JSON of one"):
        conversation({"messages": OSLO + SAID, "tools": "[{'name':'f'}]"})


def test_calls_of_openais_and_sharegpts_older_formats_are_calls():
    wanted = conversation({"messages": OSLO + SAID}).messages[1]["tool_calls"]
    older = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert conversation({"messages": [OSLO[0], older, {"role": "function", "content": "3"}, *SAID]}).messages[1]["tool_calls"] == wanted
    spoken = [{"from": "human", "value": "Oslo?"}, {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
              {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Done."}]  # fmt: skip
    assert conversation({"conversations": spoken}).messages[1]["tool_calls"] == wanted


def test_a_developer_is_the_system():
    found = conversation({"messages": [{"role": "developer", "content": "S"}, OSLO[0], *SAID]})
    assert found.messages[0] == {"role": "system", "content": "S"}


@pytest.fixture(scope="module")
def ids_of(tmp_path_factory):
    """The ids of conversations and the spans that are trained on, under a template that shows tools, calls and reasoning."""
    folder, content = chat_templates.save_tokenizer(tmp_path_factory.mktemp("model")), "{{- message.content or '' }}"
    (folder / "thinking.jinja").write_text(CHATML.replace(content, "{{- message.reasoning_content or '' }}" + content), encoding="utf-8")
    make = ChatExamples(*chat_tokenizer(folder, str(folder / "thinking.jinja")), 10**6)

    def ids(conversations):
        guard = make.encoder.guarded
        guarded = (replace(one, messages=guard(one.messages), tools=guard(one.tools)) for one in conversations)
        texts, spans = zip(*map(make.rendered, guarded), strict=True)
        return [each.ids for each in make.encoder.encode(texts)], spans

    return ids


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.slow)])
def test_random_records_with_tools_have_the_same_ids_whatever_holds_them(count, mixed, tmp_path, ids_of):
    """mixed: fields differ in type from record to record, and JSON says nulls; the other records Arrow holds as structs."""
    lines, *others = written(tmp_path / "rows", random_chats.records(7, count, mixed), mixed)
    wanted = ids_of(open_chats_of(ChatSource(str(lines))))
    assert len(wanted[0]) == count and len(others) == 5
    for path in others:
        assert ids_of(open_chats_of(ChatSource(str(path)))) == wanted, path


DAYS = [{"prompt": f"2024-01-{day}", "completion": f"2024-02-{day}", "system": ""} for day in range(10, 30)]
TURNS = [{"instruction": "C?", "input": text, "output": "[1]", "history": [["A?", f"B{text}"]] * count}
         for text in ("", "null") for count in (0, 2)]  # fmt: skip
BUDGETS = [{"prompt": "A?", "completion": "B", "chat_template_kwargs": {"budget": each}} for each in (1, 2.5)]
SPOKEN = [{"from": "human", "value": "1?"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1.0}}'},
          {"from": "observation", "value": "{}"}, {"from": "gpt", "value": "x\u2028"}]  # fmt: skip


@pytest.mark.parametrize("rows", [DAYS, TURNS, BUDGETS, [{"conversations": SPOKEN, "tools": json.dumps([WEATHER])}]])
def test_records_of_each_shape_are_the_same_whatever_holds_them(rows, tmp_path):
    lines, *others = map(whole, written(tmp_path / "rows", rows, mixed=False))
    assert len(lines) == len(rows) and others == [lines] * 5


def whole(path):
    """All of a file's conversations as text: Python takes 1, 1.0 and true for equal."""
    read = open_chats_of(ChatSource(str(path)))
    return [json.dumps([each.messages, each.tools, each.arguments, each.first, each.unread]) for each in read]


def test_a_time_of_day_that_a_table_made_of_a_text_is_refused_by_place(tmp_path):
    _, _, parquet, *_ = written(tmp_path / "rows", [{"prompt": "When?", "completion": "2024-01-31T10:00:00"}], mixed=False)
    with pytest.raises(ChatError, match="read.parquet:1 has no list of messages, and no text, where one is wanted, but datetime"):
        whole(parquet)


def pair(random: Random) -> dict:
    """A pair of whole conversations or of texts beside a prompt, with what else a pair may have."""
    asked, system = [{"role": "user", "content": f"q{random_chats.text(random)}"}], random_chats.text(random)
    answers = {"chosen": f"a{random_chats.text(random)}", "rejected": f"b{random_chats.text(random)}"}
    said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    tools = [random_chats.tool(random, "f", mixed=False)]
    return {"prompt": asked, **said, "tools": tools, "margin": random.choice([0, 1, 0.5])} | ({"system": system} if system.strip() else {})


def test_random_pairs_have_the_same_ids_and_margins_whatever_holds_them(tmp_path, ids_of):
    random = Random(3)
    first = {"tools": random_chats.complete(random)["tools"]}
    lines, *others = written(tmp_path / "rows", [pair(random) | first, *(pair(random) for _ in range(99))], mixed=False)

    def read(path):
        pairs = list(open_preferences_of(ChatSource(str(path))))
        return [each.value for each in pairs], ids_of(answer for each in pairs for answer in each.answers)

    wanted = read(lines)
    for path in others:
        assert read(path) == wanted, path
