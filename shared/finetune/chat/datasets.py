"""Chapter 10. Instruction datasets as conversations: JSONL, CSV, Parquet and the Hugging Face hub, in the shapes that are in use.

    messages                      a list of {role, content}; also under the name conversations, or as {from, value} (ShareGPT's)
    prompt, completion            two texts, or two lists of messages, of which the second is trained on
    instruction, input, output    the user's words, perhaps with a text that they are about, and the answer

Beside them a record may have `system`, a system prompt, and `tools`, descriptions that a template shows. Lists may be JSON, as in CSV.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shared.corpus import CorpusError
from shared.course.bounds import PositiveInt, checked
from shared.course.errors import CourseError
from shared.course.typed import PathText
from shared.data import hub, tables
from shared.data.source import Source, kind_of_file
from shared.data.sources import files_at
from shared.finetune.chat.template import Message

ROLES = ("system", "user", "assistant", "tool")
SPOKEN = {"human": "user", "gpt": "assistant", "function_call": "assistant", "function": "tool", "observation": "tool"}  # ShareGPT's roles
SHAPES = "messages; prompt and completion; or instruction, perhaps input, and output"


class ChatError(CourseError):
    """A record that is no conversation: where it is, what is wrong, and what to do."""


@dataclass(frozen=True)
@checked
class ChatSource:
    """One source of conversations.

    Args:
        path: a file (JSONL, CSV, Parquet), a folder of them, or the name of a dataset on the Hugging Face hub.
        kind: what it is; auto goes by the path: a name that is no path here is a hub dataset.
        suffixes: of the files to read in a folder, such as [".jsonl"]; empty for every file.
        split: which split of a hub or saved dataset.
        config: the configuration of a hub dataset that has several.
        revision: the version of a hub dataset, by tag or commit.
        streaming: read a hub dataset as it arrives, rather than download it first.
        limit: at most this many conversations; null for all.
    """

    path: PathText
    kind: Literal["auto", "jsonl", "csv", "parquet", "saved", "hub"] = "auto"
    suffixes: tuple[str, ...] = ()
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = True
    limit: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not self.path.strip() or "\0" in self.path:
            raise ValueError(f"sources has the path {self.path!r}: give a file, a folder, or the name of a hub dataset.")

    def resolved_kind(self) -> str:
        """What `auto` stands for; "text" is a folder, or a file of another kind."""
        return Source(self.path, self.kind).resolved_kind()


@dataclass(frozen=True)
class Conversation:
    """Messages with one of the ROLES each, and text as content.

    place: where it was read, such as "a.jsonl:3". first: messages before this one are only read, answers too.
    """

    place: str
    messages: list[Message]
    tools: list | None = None
    first: int = 0

    def with_system(self, prompt: str | None) -> "Conversation":
        """This conversation with a system prompt, if it has none."""
        if prompt is None or self.messages[0]["role"] == "system":
            return self
        return replace(self, messages=[{"role": "system", "content": prompt}, *self.messages], first=self.first + bool(self.first))

    def prompt_digest(self) -> bytes:
        """Equal for conversations that begin with the same words, up to the first answer that is trained on."""
        answer = next(n for n, message in enumerate(self.messages) if n >= self.first and message["role"] == "assistant")
        return hashlib.sha256(json.dumps(self.messages[:answer], sort_keys=True).encode()).digest()


def open_chats_of(source: ChatSource) -> Iterator[Conversation]:
    """The conversations of a source, in its order."""
    for number, (place, record) in enumerate(records(source)):
        if number == source.limit:
            return
        yield conversation_of(record, place)


def records(source: ChatSource) -> Iterator[tables.Record]:
    """The records of a source with their places."""
    kind = source.resolved_kind()
    name = Path(source.path).name
    if kind == "embedded":
        raise CorpusError("The embedded corpus holds no conversations: give a file, a folder, or the name of a hub dataset.")
    if kind == "hub":
        yield from places(hub.unbroken(hub.open_hub(source), source), name)
    elif kind == "saved":
        batches = hub.open_saved(source).with_format("arrow").iter(tables.ROWS)
        yield from places(rows_of(batches, source.path), name)
    else:
        for file in files_at(source)[1]:
            yield from records_of_file(file, kind_of_file(file) if source.kind == "auto" else kind)


def records_of_file(file: Path, kind: str) -> Iterator[tables.Record]:
    if kind == "jsonl":
        yield from tables.records_of_json(file, file.name, refuse_record)
    elif kind == "csv":
        yield from tables.records_of_csv(file, file.name, lambda fields: None)
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                yield from places(rows_of(opened.iter_batches(tables.ROWS), file.name), file.name)
        except pyarrow.ArrowException as error:
            raise CorpusError(f"{file} is not a whole Parquet file ({tables.first_line(error)}): make it again.") from None
    else:
        raise ChatError(f"{file} is no file of conversations: give JSONL, CSV or Parquet, or say which files with suffixes.")


def rows_of(batches: Any, name: str) -> Iterator[dict[str, Any]]:
    """The rows of Arrow batches or tables, whose memory may be a damaged file's."""
    import pyarrow

    try:
        for batch in batches:
            batch.validate(full=True)
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise CorpusError(f"{name} is damaged ({tables.first_line(error)}): make it again.") from None


def places(rows: Any, name: str) -> Iterator[tables.Record]:
    return ((f"{name}:{number}", row) for number, row in enumerate(rows, 1))


def refuse_record(place: str, reason: str) -> None:
    raise ChatError(f"{place} {reason}: mend or remove it.")


def conversation_of(record: Any, place: str) -> Conversation:
    """A record of one of the three shapes as a conversation."""
    if not isinstance(record, dict):
        refuse_record(place, "is not a record with fields")
    fields = {name: parsed(value) if name in ("messages", "conversations", "tools") else value for name, value in record.items()}
    prompt: Any = []
    completion = fields.get("messages") or fields.get("conversations")
    if completion is not None:
        pass
    elif "prompt" in fields and "completion" in fields:
        prompt, completion = listed(fields["prompt"], "user"), listed(fields["completion"], "assistant")
    elif "instruction" in fields and "output" in fields:
        asked = [text for text in (fields["instruction"], fields.get("input")) if text]
        prompt = listed("\n\n".join(asked) if all(isinstance(text, str) for text in asked) else None, "user")
        completion = listed(fields["output"], "assistant")
    elif not all(str(name).isprintable() for name in fields):
        refuse_record(place, "has names of fields that are no text, as in a file of another kind")
    else:
        raise ChatError(f"{place} has the fields {', '.join(map(repr, fields)) or 'none'}: a conversation has {SHAPES}.")
    if not isinstance(completion, list) or not isinstance(prompt, list):
        refuse_record(place, "has no list of messages, and no text, where one is wanted")
    if fields.get("system") and isinstance(fields["system"], str):
        prompt = [{"role": "system", "content": fields["system"]}, *prompt]
    messages = [message_of(message, f"{place}, message {number}") for number, message in enumerate([*prompt, *completion], 1)]
    require_order(messages, len(prompt), place)
    try:
        json.dumps([messages, fields.get("tools")], ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        refuse_record(place, f"holds what is no text, number or list of them ({tables.first_line(error)})")
    return Conversation(place, messages, fields.get("tools") or None, len(prompt))


def parsed(value: Any) -> Any:
    """A list that a table holds as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def listed(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else parsed(value)


def message_of(message: Any, place: str) -> Message:
    """A message with a role of ours and its content as one text."""
    if not isinstance(message, dict):
        refuse_record(place, f"is {type(message).__name__}, not a message with role and content")
    message = {name: value for name, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        message = {"role": SPOKEN.get(message["from"], message["from"]), "content": message.get("value")}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        refuse_record(place, f"has the role {role!r}, which is none of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        found = "nothing" if content is None else type(content).__name__
        refuse_record(place, f"has {found} as content, where a text or a list of texts is wanted")
    return message | ({} if content is None else {"content": content})


def require_order(messages: list[Message], first: int, place: str) -> None:
    """Refuse messages of which none is to be learned, or which follow each other as no chat does."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[first:]:
        refuse_record(place, "has no answer of the assistant to train on")
    for number, (before, role) in enumerate(zip([None, *roles], roles, strict=False), 1):
        if (role == "system" and number > 1) or (role == "tool" and before not in ("assistant", "tool")):
            where = "the first message" if role == "system" else "after an assistant's"
            refuse_record(f"{place}, message {number}", f"has the role {role} and stands in the wrong place, which is {where}")
