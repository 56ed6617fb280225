"""Records in one encoding and another: JSON text where a structure is expected, what Arrow makes of rows, and older formats of calls.

Files are written by the library datasets.
"""

import json
from random import Random

import pytest
from datasets import Dataset, load_dataset
from tool_records import OSLO, SAID, TWO_TOOLS, WEATHER, called, conversation

from shared.finetune.chat.datasets import ChatSource, open_chats_of
from shared.finetune.chat.messages import ChatError


def conversations(path, kind="auto"):
    return [(each.messages, each.tools) for each in open_chats_of(ChatSource(str(path), kind))]


def written(folder, rows):
    """The same rows as JSONL; as Parquet and a saved dataset from objects, with all keys; and as datasets reads and saves the JSONL."""
    folder.mkdir(exist_ok=True)
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read = load_dataset("json", data_files=str(lines), split="train", cache_dir=str(folder / "cache"))
    read.to_parquet(folder / "read.parquet")
    read.save_to_disk(folder / "read")
    paths = [lines, folder / "read.parquet", folder / "read"]
    made = Dataset.from_list(rows)
    made.to_parquet(folder / "made.parquet")
    made.save_to_disk(folder / "made")
    return [*paths, folder / "made.parquet", folder / "made"]


def test_the_nulls_that_arrow_puts_into_structs_are_in_no_text(tmp_path):
    lines, *others = written(tmp_path / "rows", TWO_TOOLS)
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


NAMES = ("a", "b", "city", "unit")


def text(random: Random, letters: str) -> str:
    return "".join(random.choices(letters, k=random.randrange(6)))


def record(random: Random) -> dict:
    """A conversation with calls of tools, whose arguments have other keys from call to call."""
    messages = [{"role": "user", "content": text(random, "pq ")}]
    for name in random.choices(NAMES, k=random.randrange(3)):
        arguments = {key: text(random, "xyz") for key in random.sample(NAMES, random.randrange(4))}
        messages += [called(name, arguments), {"role": "tool", "content": text(random, "rs")}]
    names = random.sample(NAMES, 2)
    functions = [{"name": name} | ({"description": text(random, "uv")} if random.random() < 0.5 else {}) for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": [*messages, {"role": "assistant", "content": text(random, "t")}], "tools": tools}


def test_ten_thousand_records_are_the_same_conversations_whatever_holds_them(tmp_path):
    random = Random(0)
    lines, *others = written(tmp_path / "rows", [record(random) for _ in range(10_000)])
    wanted = conversations(lines)
    assert len(wanted) == 10_000
    for path in others:
        assert conversations(path) == wanted, path
