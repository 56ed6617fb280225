"""Rows of GRPO tasks as trl, verl and datasets write them: the ids of their prompts are transformers', and what nothing reads is named."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from shared.course.errors import CourseError
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.chat.prepare import ChatReport, chat_tokenizer
from shared.rl.tasks import TasksConfig, open_tasks, task_of
from shared.trainer.modes.answering import Answering
from shared.trainer.modes.grpo import Prompting, unread_in_prompts
from tests.support import chat_templates

ASKED = {"role": "user", "content": "Weather in Oslo?"}
TOOLS = [{"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}}}
         for name, properties in (("weather", {"city": {"type": "string"}}), ("add", {"x": {"type": "number"}}))]  # fmt: skip
SHOWS_NAMES = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + ('<think>\\n' if thinking else '') }}{%- endif %}"
)
ROWS = [
    {"prompt": "3 + 4?", "answer": "7"},
    {"prompt": [ASKED], "answer": "3", "tools": TOOLS},
    {"prompt": "Weather in Oslo?", "answer": "3", "tools": TOOLS[:1], "system": [{"type": "text", "text": "Be brief."}]},
    {"prompt": [{"role": "system", "content": "Be brief."}, ASKED], "answer": "3", "tools": json.dumps(TOOLS)},
]


def prompting(tmp_path, template: str) -> Prompting:
    folder = chat_templates.save_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Prompting(*chat_tokenizer(folder, None), ChatReport())


def prompts_of(text: Prompting, tasks) -> list[list[int]]:
    return Answering.prompts_of(SimpleNamespace(text=text, tokenizer=text.tokenizer, system=None), tasks)


def by_transformers(tmp_path, row, **more) -> list[int]:
    prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    messages = [{"role": "system", "content": row["system"][0]["text"]}, *prompt] if "system" in row else prompt
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False, **more)


def test_tools_and_a_system_prompt_reach_the_prompt(tmp_path):
    text = prompting(tmp_path, chat_templates.TEMPLATES["qwen"])
    found = prompts_of(text, [task_of(row, "rows:1", TasksConfig()) for row in ROWS])
    assert found == [by_transformers(tmp_path, row) for row in ROWS]
    Dataset.from_list([row | {"tools": row.get("tools") and json.dumps(TOOLS)} for row in ROWS[1::2]]).to_parquet(tmp_path / "rows.parquet")
    read = open_tasks(TasksConfig((ChatSource(str(tmp_path / "rows.parquet")),), held_out=0)).training
    assert prompts_of(text, read) == [by_transformers(tmp_path, ROWS[number]) for number in (1, 3)]


def test_arguments_of_the_template_reach_the_prompt(tmp_path):
    text, row = prompting(tmp_path, SHOWS_NAMES), {"prompt": "3 + 4?", "answer": "7", "chat_template_kwargs": {"thinking": True}}
    assert prompts_of(text, [task_of(row, "rows:1", TasksConfig())]) == [by_transformers(tmp_path, row, thinking=True)]
    assert text.tokenizer.decode(prompts_of(text, [task_of(row, "rows:1", TasksConfig())])[0]).endswith("<think>\n")


def test_tools_that_a_template_does_not_show_are_refused(tmp_path):
    text = prompting(tmp_path, SHOWS_NAMES)
    with pytest.raises(CourseError, match="shows no tools, and the record has some"):
        prompts_of(text, [task_of(row, "rows:1", TasksConfig()) for row in ROWS])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": "[{'name': 'f'}]"}, "rows:1 has tools that are no list of mappings"),
        ({"chat_template_kwargs": [1]}, "rows:1 has chat_template_kwargs that are no mapping"),
        ({"chat_template_kwargs": {"messages": []}}, "rows:1 has chat_template_kwargs that .* hold one of messages"),
        ({"system": 3}, "rows:1, system has int as content"),
        ({"prompt": [{"role": "system", "content": "S"}, ASKED], "system": "T"}, "rows:1, message 2 has the role system"),
    ],
)
def test_fields_of_another_kind_are_refused_by_place(fields, said):
    with pytest.raises(CourseError, match=said):
        task_of({"prompt": "1?", "answer": "1"} | fields, "rows:1", TasksConfig())


def test_fields_that_nothing_reads_are_counted(tmp_path):
    row = {"data_source": "gsm8k", "prompt": [ASKED], "ability": "math", "extra_info": {"index": 3}, "id": "7", "images": []}
    rows = [row | {"reward_model": {"style": "rule", "ground_truth": "2"}}, row | {"answer": "2", "reward_model": {"style": "rule"}}]
    rows.append(ROWS[2] | {"kind": "weather", "images": ["x"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    unread = Counter()
    open_tasks(TasksConfig((ChatSource(str(tmp_path / "rows.jsonl")),), held_out=0), unread)
    assert unread == {"data_source": 2, "ability": 2, "extra_info": 2, "reward_model": 1, "images": 1}


@pytest.mark.parametrize(("template", "wanted"), [(chat_templates.TEMPLATES["qwen"], {"messages.name": 2}), (SHOWS_NAMES, {})])
def test_fields_of_messages_are_read_by_the_template_or_counted(tmp_path, template, wanted):
    text, named = prompting(tmp_path, template), {"prompt": [ASKED | {"name": "Ada", "id": "3"}], "answer": "3"}
    tasks = [task_of(row, "rows:1", TasksConfig()) for row in (named, ROWS[0], named)]
    assert unread_in_prompts(tasks, text) == wanted
    argued = named | {"chat_template_kwargs": {"thinking": True}}
    assert (unread_in_prompts([task_of(argued, "rows:1", TasksConfig())], text)["chat_template_kwargs.thinking"] == 1) == bool(wanted)
    assert prompts_of(text, tasks)[0] == by_transformers(tmp_path, named)
