"""Chapter 10. Chat messages, tool calls and tools of all formats in one normal form, before any template sees them.

    role      system (also developer), user, assistant, tool (also function); ShareGPT's `from` with human, gpt, function_call, observation
    content   one text, of a text or a list of text parts
    calls     `tool_calls`, a list of mappings whose `function.arguments` are a mapping; also `function_call` (OpenAI's of 2023, ShareGPT's)
    tools     a list of mappings; also `tool_defs` and `functions`

Values may be JSON text at any depth where a structure is wanted, as OpenAI's arguments and cells of a table are. A whole number is an
integer, 1 for 1.0, since a table makes floats of both. Which answers are trained may be marked by message: `weight` (OpenAI), `train`
and `training` (axolotl), `loss_mask`, `loss` and `loss_scale` (ms-swift).
"""

import json
from collections.abc import Sequence
from typing import Any

from shared.course.errors import CourseError
from shared.data.tables import first_line

Message = dict[str, Any]  # `role` and `content`, perhaps `tool_calls`
ROLES = ("system", "user", "assistant", "tool")
ROLE_OF = {"developer": "system", "function": "tool"}
SPEAKERS = {  # ShareGPT's, LLaMA-Factory's and ms-swift's
    "human": "user", "gpt": "assistant", "function_call": "assistant", "tool_call": "assistant", "function": "tool",
    "observation": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # speakers whose words are calls of tools
MARKS = ("weight", "train", "training", "loss_mask", "loss", "loss_scale")  # of a message: whether it is trained on
TEXTS = ("text", "input_text", "output_text", None)  # types of parts that are texts
DETAILED = "train_detail"  # axolotl's: parts of a message
HARMLESS = ("id", "tool_call_id", "uuid", "type")  # fields that name things, and stand in no text
TOOLS = ("tools", "tool_defs", "functions")
SAYING = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # what an answer says beside its content
EXACT = 2.0**53  # floats below it hold every whole number


class ChatError(CourseError):
    """A record that is no conversation: where it is, what is wrong, and what to do."""


def refuse_record(place: str, reason: str) -> None:
    raise ChatError(f"{place} {reason}: mend or remove it.")


def parsed(value: Any) -> Any:
    """The value of a text that is JSON; another value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def structure(value: Any) -> Any:
    """A mapping or list that may be JSON text, as whole or in its elements; another value as it is."""
    found = parsed(value)
    found = found if isinstance(found, dict | list) else value
    return [structure(each) for each in found] if isinstance(found, list) else found


def with_whole(value: Any) -> Any:
    """A value with each whole number in it as an integer."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    if isinstance(value, dict):
        return {name: with_whole(each) for name, each in value.items()}
    return [with_whole(each) for each in value] if isinstance(value, list) else value


def message_of(message: Any, place: str) -> Message:
    """A message with a role of ours and its content as one text.

    Raises:
        ChatError: it is no message of a known form.
    """
    message = structure(message)
    if not isinstance(message, dict):
        refuse_record(place, f"is {type(message).__name__}, not a message with role and content")
    message = {name: value for name, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        message = from_speaker(without(message, "from", "value"), message["from"], message.get("value"))
    elif isinstance(message.get("role"), str) and message["role"] in SPEAKERS:
        message = from_speaker(without(message, "content"), message["role"], message.get("content"))
    role = message.get("role")
    role = ROLE_OF.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        refuse_record(place, f"has the role {role!r}, which is none of {', '.join(ROLES)}")
    if "function_call" in message:
        message = {"tool_calls": [{"type": "function", "function": message["function_call"]}]} | message
        del message["function_call"]
    if "tool_calls" in message:
        message["tool_calls"] = calls_of(message["tool_calls"], place)
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content, beside = joined(content, place)
        message = message | beside
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        found = "nothing" if content is None else type(content).__name__
        refuse_record(place, f"has {found} as content, where a text or a list of texts is wanted")
    return with_whole(message | {"role": role} | ({} if content is None else {"content": content}))


def from_speaker(said: Message, speaker: Any, value: Any) -> Message:
    """A message of a speaker, with what else it says, as one with role and content; of one whose words are calls, with calls."""
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    calls = structure(value) if speaker in CALLS else None
    calls = [calls] if isinstance(calls, dict) else calls
    if isinstance(calls, list) and calls and all(isinstance(call, dict) and "name" in call for call in calls):
        return said | {"role": role, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    return said | {"role": role, "content": value}


def joined(parts: list[dict[str, Any]], place: str) -> tuple[str, dict[str, Any]]:
    """The text of parts, whose text may be called content (oumi's), and their other fields, as fields of the message.

    Raises:
        ChatError: a part of another type, such as a picture or a call, or one that says whether it is trained on.
    """
    texts, beside = [], {}
    for part in parts:
        part = {name: value for name, value in part.items() if value is not None}
        text = part.get("text", part.get("content"))
        if part.get("type") not in TEXTS or not isinstance(text, str):
            refuse_record(place, f"has list as content, with a part of type {part.get('type')!r}, where texts are wanted")
        if mark := next((name for name in MARKS if name in part), None):
            refuse_record(place, f"has a part with {mark}, which trains on parts of a message: split it, or give {mark} for the message")
        texts.append(text)
        beside |= {f"content.{name}": value for name, value in part.items() if name not in ("type", "text", "content")}
    return "".join(texts), beside


def require_json(value: Any, place: str) -> None:
    """Reject what neither a template nor JSON has a word for, such as a date or half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        refuse_record(place, f"holds what is no text, number or list of them ({first_line(error)})")


def calls_of(calls: Any, place: str) -> list[dict[str, Any]]:
    """The calls of tools in a message, with arguments as mappings. Arguments that are no JSON, such as a program, stay text."""
    calls = structure(calls)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        refuse_record(place, "has tool_calls that are no list of mappings")
    made = []
    for call in calls:
        call = {name: value for name, value in call.items() if value is not None}
        function = structure(call.get("function", call))
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse_record(place, "has a tool call without the name of a function")
        if "arguments" in function:
            given = function["arguments"]
            decoded = parsed(given)
            arguments = {} if given in ("", None) or decoded is None else decoded if isinstance(decoded, dict | list) else given
            function = function | {"arguments": arguments}
        made.append(call | {"function": function} if "function" in call else function)
    return made


def name_of_tools(fields: dict[str, Any]) -> str | None:
    """The field in which a record describes tools."""
    return next((name for name in TOOLS if fields.get(name)), None)


def tools_of(fields: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
    """The tools that a record describes, None where it describes none."""
    name = name_of_tools(fields)
    if name is None:
        return None
    tools = structure(fields[name])
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse_record(place, f"has {name} that are no list of mappings, nor JSON of one")
    return with_whole([tool if name == "tools" or "function" in tool else {"type": "function", "function": tool} for tool in tools]) or None


def with_system(messages: Sequence[Message], prompt: str | None) -> list[Message]:
    """Messages with a system prompt, if they have none."""
    has_own = prompt is None or messages[0]["role"] == "system"
    return [*messages] if has_own else [{"role": "system", "content": prompt}, *messages]


def text_of(messages: Sequence[Message]) -> str:
    """The contents of messages as one text, for a model that reads no roles."""
    return "\n\n".join(message["content"] for message in messages if message.get("content"))


def says_nothing(message: Message) -> bool:
    """Whether an answer is empty: trained on, it would teach to say nothing."""
    return not (message.get("content") or "").strip() and not any(message.get(name) for name in SAYING)


def is_trained(message: Message, place: str) -> bool:
    """Whether an answer's marks leave it to be trained on. Both values of every mark are read; marks of other messages may only say no.

    Raises:
        ChatError: a mark of another value, marks that contradict each other, or one that asks for what is not done here.
    """
    if DETAILED in message:
        refuse_record(place, f"has {DETAILED}, which trains on parts of a message: split the message, or give weight for all of it")
    said = {name: message[name] for name in MARKS if name in message}
    for name, value in said.items():
        if value not in (0, 1) or isinstance(value, str):
            refuse_record(place, f"has the {name} {value!r}, where 0 or 1, false or true is wanted")
    if len({bool(value) for value in said.values()}) > 1:
        refuse_record(place, f"is to be trained on by one of {', '.join(said)} and not by another")
    trained = all(said.values())
    if said and trained and message["role"] != "assistant":
        [name, value] = next(iter(said.items()))
        refuse_record(place, f"is to be trained on ({name} {value!r}), and only the assistant's answers are")
    return trained and message["role"] == "assistant"


def without(message: Message, *names: str) -> Message:
    return {name: value for name, value in message.items() if name not in names}


def without_marks(message: Message) -> Message:
    return without(message, *MARKS)


def require_trained(fields: dict[str, Any], place: str) -> tuple[str, ...]:
    """The fields of a record that say that it is trained on as any other: all of it, as a good answer, and not the user's words.

    Raises:
        ChatError: it is not to be trained on, or only in parts.
    """
    read = []
    for name in (*MARKS[:4], "mask", "label", "kto_tag"):
        said = str(fields.get(name)).lower()
        if name in ("label", "kto_tag"):
            if said in ("false", "0"):
                refuse_record(place, f"has the {name} false, so its completion is a bad answer, for mode=dpo with dpo.loss=kto")
            read += [name] * (said in ("true", "1"))
        elif name in fields and fields[name] not in ("", [], {}):
            if said not in (("user", "human") if name == "mask" else ("true", "1", "1.0")):
                what = f"has the {name} {fields[name]!r} for a whole record, where answers are trained on and nothing else"
                refuse_record(place, f"{what}: give each answer a weight of 0 or 1")
            read.append(name)
    return tuple(read)
