"""Chapter 11. Preference datasets (chosen and rejected answers) from JSONL, CSV, Parquet and the hub, in the shapes that are in use.

    prompt, chosen, rejected      texts or lists of messages: what is asked, and the better and the worse answer to it
    chosen, rejected              two whole conversations, whose common beginning is the prompt: lists of messages, or one text each with
                                  turns that begin with "Human:" and "Assistant:" after an empty line
    prompt, completion, label     one answer, and whether it is a good one (KTO)

A pair may have `margin`, by how much the chosen answer is better; each record may have `system` and `tools`, as conversations have.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from shared.finetune.chat.datasets import ChatSource, Conversation, conversation_of, records
from shared.finetune.chat.messages import (
    HARMLESS,
    TOOLS,
    ChatError,
    Message,
    message_of,
    parsed,
    refuse_record,
    require_trained,
    says_nothing,
    without,
)

SHAPES = (
    "a pair has chosen and rejected, and a prompt unless both are whole conversations; a single answer has prompt, completion and label"
)
BESIDE = ("system", *TOOLS, "chat_template_kwargs")
TURN = re.compile(r"\n\n(Human|Assistant):")
TURNS = {"Human": "user", "Assistant": "assistant"}
LARGEST = 1e6  # margin
LABELS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}


@dataclass(frozen=True)
class Preference:
    """A prompt with a chosen and a rejected answer, or with one answer.

    place: where it was read, such as "a.jsonl:3". answers: conversations with the same beginning, the chosen one first. value: a pair's
    margin; of a single answer 1 if it is good, else 0.
    """

    place: str
    answers: tuple[Conversation, ...]
    value: float

    def with_system(self, prompt: str | None) -> "Preference":
        """This preference with a system prompt, if it has none."""
        return replace(self, answers=tuple(answer.with_system(prompt) for answer in self.answers))


def open_preferences_of(source: ChatSource) -> Iterator[Preference]:
    """The preferences of a source, in its order."""
    for number, (place, record) in enumerate(records(source)):
        if number == source.limit:
            return
        yield preference_of(record, place)


def preference_of(record: Any, place: str) -> Preference:
    """A record of one of the three shapes."""
    if not isinstance(record, dict):
        refuse_record(place, "is not a record with fields")
    fields = {name: value for name, value in record.items() if value is not None}
    if "chosen" in record or "rejected" in record:
        names = ("chosen", "rejected")
    elif "completion" in record and "label" in record:
        names = ("completion",)
    else:
        shown = ", ".join(repr(name) for name in list(record)[:20]) or "none"
        raise ChatError(f"{place} has the fields {shown}: {SHAPES}.")
    answers = [answer_of(fields.get(name), name, place) for name in names]
    prompt = messages_of(fields["prompt"], "user", f"{place}, prompt") if fields.get("prompt") else []
    if prompt and len(names) == 2 and all(answer[0]["role"] in ("system", "user") for answer in answers):
        whole, answers = split(answers, place)
        if [told(message) for message in prompt] != [told(message) for message in whole[-len(prompt) :]]:
            refuse_record(place, "has a prompt that is not the end of what its two conversations have in common")
        prompt = whole
    elif prompt:
        answers = [answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in answers]
        roles = [[message["role"] for message in answer] for answer in answers]
        if any("assistant" in of_answer and of_answer[0] in ("system", "user") for of_answer in roles):
            refuse_record(place, "has a prompt, and an answer that begins with another question")
    elif len(names) == 1 or any(answer[0]["role"] == "assistant" for answer in answers):
        refuse_record(place, "has no prompt")
    else:
        prompt, answers = split(answers, place)
    for name, answer in zip(names, answers, strict=True):
        if all(map(says_nothing, answer)):
            refuse_record(place, f"has an empty answer in {name}")
    if len(answers) == 2 and answers[0] == answers[1]:
        refuse_record(place, "has two equal answers, chosen and rejected")
    beside = {name: fields[name] for name in BESIDE if name in fields}
    made = [conversation_of(beside | {"prompt": prompt, "completion": answer}, place) for answer in answers]
    read = {*names, *BESIDE, "prompt", "margin" if len(names) == 2 else "label"}
    read |= set(require_trained(without(fields, "label", "kto_tag"), place))
    unread = tuple(name for name in fields if name not in read)
    made[0] = replace(made[0], unread=unread)
    return Preference(place, tuple(made), margin_of(fields, place) if len(names) == 2 else label_of(fields, place))


def answer_of(value: Any, name: str, place: str) -> list[Message]:
    if value is None:
        refuse_record(place, f"has no {name} answer" if name != "completion" else "has no completion")
    if value in ("", [], {}):
        refuse_record(place, f"has an empty answer in {name}")
    return messages_of(value, "assistant", f"{place}, {name}")


def messages_of(value: Any, role: str, place: str) -> list[Message]:
    """A text, a message, or a list of them as messages of our roles. A text may hold a list as JSON, as in CSV, or turns."""
    if isinstance(value, str):
        before, *turns = TURN.split(value)
        if turns and not before.strip():
            value = [{"role": TURNS[who], "content": text.strip()} for who, text in zip(turns[::2], turns[1::2], strict=True)]
            value = value[:-1] if role == "user" and not value[-1]["content"] else value  # a prompt that ends with "Assistant:"
        else:
            found = parsed(value)
            value = found if isinstance(found, list) and found and all(map(is_message, found)) else [{"role": role, "content": value}]
    value = [value] if is_message(value) else value
    if not isinstance(value, list) or not value:
        refuse_record(place, f"is {type(value).__name__}, where a text or a list of messages is wanted")
    return [message_of(message, f"{place}, message {number}") for number, message in enumerate(value, 1)]


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def split(answers: list[list[Message]], place: str) -> tuple[list[Message], list[list[Message]]]:
    """Two whole conversations as what they have in common, up to the first message that differs, and the rest of each."""
    chosen, rejected = answers
    if chosen == rejected:
        refuse_record(place, "has two equal conversations, chosen and rejected")
    common = len(list(takewhile(lambda pair: told(pair[0]) == told(pair[1]), zip(chosen, rejected, strict=False))))
    if common == min(len(chosen), len(rejected)):
        refuse_record(place, "has two conversations of which one is the beginning of the other, so no answers to compare")
    roles = {answer[common]["role"] for answer in answers}
    if not common or roles != {"assistant"}:
        refuse_record(place, f"has two conversations that differ first in message {common + 1}, which is no answer of the assistant")
    return chosen[:common], [answer[common:] for answer in answers]


def told(message: Message) -> Message:
    """What two equal messages have in common: names of things and spaces at the ends aside."""
    return {name: value.strip() if name == "content" else value for name, value in message.items() if name not in HARMLESS}


def margin_of(fields: dict[str, Any], place: str) -> float:
    """A pair's margin; 0 where none is given."""
    given = fields.get("margin", 0.0)
    try:
        margin = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not 0 <= margin <= LARGEST:
        refuse_record(place, f"has the margin {str(given)[:40]!r}, where a number of at least 0 is wanted")
    return margin


def label_of(fields: dict[str, Any], place: str) -> float:
    """1 for a good answer, 0 for a bad one."""
    given = str(fields.get("label")).lower()
    if given not in LABELS:
        refuse_record(place, f"has the label {given[:40]!r}, where true or false is wanted")
    return LABELS[given]
