"""Records with calls of tools, for tests of chats."""

from shared.finetune.chat.datasets import conversation_of

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}


def called(name, arguments):
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


OSLO = [{"role": "user", "content": "Oslo?"}, called("weather", {"city": "Oslo"}), {"role": "tool", "content": "3"}]
SUMS = [{"role": "user", "content": "1?"}, called("add", {"x": 1}), {"role": "tool", "content": "1"}]
SAID = [{"role": "assistant", "content": "Done."}]
TWO_TOOLS = [{"messages": OSLO + SAID, "tools": [WEATHER, ADD]}, {"messages": SUMS + SAID, "tools": [WEATHER, ADD]}]


def conversation(record):
    return conversation_of(record, "rows.jsonl:1")
