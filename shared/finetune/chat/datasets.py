"""Chapter 10. Instruction datasets as conversations: JSONL, CSV, Parquet and the Hugging Face hub, in the shapes that are in use.

    messages                      a list of {role, content}; also under the name conversations, or as {from, value} (ShareGPT's)
    prompt, completion            two texts, or two lists of messages, of which the second is trained on
    instruction, input, output    the user's words, perhaps with a text that they are about, and the answer; perhaps with `history`, a list
                                  of earlier [question, answer], which are trained on as well (LLaMA-Factory's)

Beside them a record may have `system`, a system prompt; `tools`, descriptions that a template shows; and `chat_template_kwargs`, arguments
of the template (TRL's). `shared.finetune.chat.messages` says what forms messages may have, and which marks say what is trained.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shared.corpus import CorpusError
from shared.course.bounds import PositiveInt, checked
from shared.course.typed import PathText
from shared.data import hub, tables
from shared.data.arrow import rows_of
from shared.data.source import Source, kind_of_file
from shared.data.sources import files_at
from shared.finetune.chat.messages import (
    ChatError,
    Message,
    is_trained,
    message_of,
    name_of_tools,
    parsed,
    refuse_record,
    require_json,
    require_trained,
    says_nothing,
    tools_of,
    with_system,
    with_whole,
    without_marks,
)
from shared.finetune.chat.template import call_of

GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # to a template, which arguments of a record cannot change
SHAPES = "messages; prompt and completion; or instruction, perhaps input, and output"


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
    """Messages with one of the roles each, and text as content.

    place: where it was read, such as "a.jsonl:3". first: messages before this one are only read, answers too. read_only: the numbers of
    further answers that are only read. arguments: of the template. unread: fields of the record that nothing here reads.
    """

    place: str
    messages: list[Message]
    tools: list | None = None
    first: int = 0
    read_only: frozenset[int] = frozenset()
    arguments: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def with_system(self, prompt: str | None) -> "Conversation":
        """This conversation with a system prompt, if it has none."""
        messages = with_system(self.messages, prompt)
        if len(messages) == len(self.messages):
            return self
        return replace(
            self,
            messages=messages,
            first=self.first + bool(self.first),
            read_only=frozenset(number + 1 for number in self.read_only),
        )

    def is_trained(self, number: int) -> bool:
        """Whether a message is an answer that is trained on."""
        return number >= self.first and number not in self.read_only and self.messages[number]["role"] == "assistant"

    def call(self, messages: Sequence[Message] | None = None, prompt: bool = False) -> dict[str, Any]:
        """What a template is called with for these messages, or for others. prompt: up to where the assistant's answer begins."""
        return self.arguments | call_of(self.messages if messages is None else messages, prompt, self.tools)

    def prompt_digest(self) -> bytes:
        """Equal for conversations that begin with the same words, up to the first answer that is trained on."""
        answer = next(filter(self.is_trained, range(len(self.messages))))
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
        batches = hub.open_hub(source).with_format("arrow").iter(tables.ROWS)
        yield from places(rows_of(hub.unbroken(batches, source), source.path), name)
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


def places(rows: Any, name: str) -> Iterator[tables.Record]:
    return ((f"{name}:{number}", row) for number, row in enumerate(rows, 1))


def conversation_of(record: Any, place: str) -> Conversation:
    """A record of one of the three shapes as a conversation."""
    if not isinstance(record, dict):
        refuse_record(place, "is not a record with fields")
    fields = {name: value for name, value in record.items() if value is not None}
    fields |= {"history": parsed(fields["history"])} if "history" in fields else {}
    prompt: Any = []
    if shape := next((name for name in ("messages", "conversations") if fields.get(name)), None):
        read, completion = {shape}, parsed(fields[shape])
    elif "prompt" in fields and "completion" in fields:
        read = {"prompt", "completion"}
        prompt, completion = listed(fields["prompt"], "user"), listed(fields["completion"], "assistant")
    elif "instruction" in fields and "output" in fields:
        read = {"instruction", "input", "output", "history"}
        asked = [text for text in (fields["instruction"], fields.get("input")) if text]
        prompt = listed("\n\n".join(asked) if all(isinstance(text, str) for text in asked) else None, "user")
        prompt = [*turns_of(fields.get("history") or [], place), *(prompt or [])]
        completion = listed(fields["output"], "assistant")
    elif empty := next((name for name in ("messages", "conversations") if name in fields), None):
        refuse_record(place, f"has no message in {empty}")
    elif not all(str(name).isprintable() for name in fields):
        refuse_record(place, "has names of fields that are no text, as in a file of another kind")
    else:
        raise ChatError(f"{place} has the fields {', '.join(map(repr, record)) or 'none'}: a conversation has {SHAPES}.")
    if wrong := [each for each in (prompt, completion) if not isinstance(each, list)]:
        refuse_record(place, f"has no list of messages, and no text, where one is wanted, but {type(wrong[0]).__name__}")
    if fields.get("system"):
        prompt = [{"role": "system", "content": fields["system"]}, *prompt]
        read |= {"system"}
    messages = [message_of(message, f"{place}, message {number}") for number, message in enumerate([*prompt, *completion], 1)]
    first = 0 if fields.get("history") and "history" in read else len(prompt)
    answers = {number for number, message in enumerate(messages) if message["role"] == "assistant"}
    trained = {number for number, message in enumerate(messages) if is_trained(message, f"{place}, message {number + 1}")}
    if not any(number >= first for number in trained):
        refuse_record(place, "has no answer of the assistant to train on")
    for number in sorted(number for number in trained if number >= first and says_nothing(messages[number])):
        refuse_record(f"{place}, message {number + 1}", "is an empty answer, which teaches to say nothing (weight 0 leaves it out)")
    require_order(messages, place)
    arguments, tools = arguments_of(fields, place), tools_of(fields, place)
    require_json([messages, tools, arguments], place)
    read |= {"chat_template_kwargs", name_of_tools(fields), *require_trained(fields, place)}
    unread = tuple(name for name, value in fields.items() if name not in read and value not in ("", [], {}))
    plain = [without_marks(message) for message in messages]
    return Conversation(place, plain, tools, first, frozenset(answers - trained), arguments, unread)


def arguments_of(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """The arguments of the template that a record gives."""
    arguments = with_whole(parsed(fields.get("chat_template_kwargs") or {}))
    if not isinstance(arguments, dict) or arguments.keys() & GIVEN:
        refuse_record(place, f"has chat_template_kwargs that are no mapping, or that hold one of {', '.join(GIVEN)}")
    return arguments


def turns_of(history: Any, place: str) -> list[Message]:
    """Earlier questions and answers, as messages."""
    turns = [parsed(turn) for turn in found] if isinstance(found := parsed(history), list) else None
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        refuse_record(place, "has a history that is no list of pairs of question and answer")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def listed(value: Any, role: str) -> Any:
    """A text as one message; anything else is the messages, which may be JSON."""
    found = parsed(value)
    return [{"role": role, "content": value}] if isinstance(value, str) and not is_messages(found) else found


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and ("role" in each or "from" in each) for each in value)


def require_order(messages: Sequence[Message], place: str) -> None:
    """Reject messages in an order that no chat has."""
    roles = [message["role"] for message in messages]
    for number, (before, role) in enumerate(zip([None, *roles], roles, strict=False), 1):
        if (role == "system" and number > 1) or (role == "tool" and before not in ("assistant", "tool")):
            where = "the first message" if role == "system" else "after an assistant's"
            refuse_record(f"{place}, message {number}", f"has the role {role} and stands in the wrong place, which is {where}")
