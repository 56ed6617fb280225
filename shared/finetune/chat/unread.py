"""Chapter 10. Unread fields: those of records and messages that decide nothing of what a model is trained on, by name and count.

A field that no format here reads may still be one that matters to its author: a reasoning that the template does not show, a
`system_prompt` under another name. So each is named in the report. A field of a message may be read by the template: its value is replaced
once, and where the text stays the same, nothing reads it. So are contents, of each role: some templates leave out a system prompt, what a
tool answers, or what an answer says beside its calls.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.messages import HARMLESS
from shared.finetune.chat.template import TemplateError

READ = ("role", "content", "tool_calls")  # of messages, by `shared.finetune.chat.messages`
TRIES = 4  # messages in which a field's value is replaced, before it is taken for unread
WORD = "Quorvane"  # stands for a value: no text holds it


class Unread:
    """Counts unread fields. counts: name -> records and messages that have it; a message's field is named `messages.NAME`.

    Args:
        render: the text of a conversation.
    """

    def __init__(self, render: Callable[[Conversation], str]):
        self.render = render
        self.counts: Counter[str] = Counter()
        self.tried: Counter[str] = Counter()
        self.shown: set[str] = set()  # fields of messages that a template reads

    def note(self, asked: Conversation, text: str) -> None:
        """Count the unread fields of a conversation with this text."""
        self.counts.update(name for name in asked.unread if name not in HARMLESS)
        self.counts.update(f"chat_template_kwargs.{name}" for name in asked.arguments if not self.is_taken(asked, name, text))
        for number, message in enumerate(asked.messages):
            for name in message.keys() - {*READ, *HARMLESS}:
                if not self.is_read(asked, number, name, text):
                    self.counts[f"messages.{name}"] += 1
            kind = f"content of {message['role']}" + (" with tool_calls" if message.get("tool_calls") else "")
            if kind not in self.shown and message.get("content") and not self.differs(asked, number, "content", kind, text):
                self.counts[f"messages.{kind}"] += 1

    def is_taken(self, asked: Conversation, name: str, text: str) -> bool:
        """Whether a template's text depends on one of the arguments that a record gives it."""
        kind = f"chat_template_kwargs.{name}"
        if kind not in self.shown and self.tried[kind] < TRIES:
            self.tried[kind] += 1
            if any(self.rendered(replace(asked, arguments=asked.arguments | {name: value})) != text for value in (WORD, False, None)):
                self.shown.add(kind)
        return kind in self.shown

    def rendered(self, asked: Conversation) -> str | None:
        """The text of a conversation, None where a field is of another type than the template reads."""
        try:
            return self.render(asked)
        except TemplateError:
            return None

    def is_read(self, asked: Conversation, number: int, name: str, text: str) -> bool:
        """Whether the text depends on a field of a message; where it sometimes does, whether it holds the value."""
        value: Any = asked.messages[number][name]
        if name not in self.shown and self.tried[name] < TRIES:
            return self.differs(asked, number, name, name, text)
        return name in self.shown and (not isinstance(value, str) or value.strip() in text)

    def differs(self, asked: Conversation, number: int, name: str, kind: str, text: str) -> bool:
        """Whether the text depends on a field of a message, which is tried TRIES times for each kind."""
        if self.tried[kind] == TRIES:
            return False
        self.tried[kind] += 1
        changed = list(asked.messages)
        changed[number] = changed[number] | {name: WORD}
        differs = self.rendered(replace(asked, messages=changed)) != text
        self.shown |= {kind} if differs else set()
        return differs
