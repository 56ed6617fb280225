"""Chapter 10. Encoding of chats: token ids with their loss mask, cut to a row. Special tokens come from the template, never from a message.

A user who types "<|im_end|>" must not end a turn. So in messages such names are broken by a mark before they are rendered, and what comes
out broken is encoded as ordinary text, without the mark. Texts without such names get the ids that transformers gives them.

A conversation that is longer than a row is cut, never continued in another row, where its answers would have no prompt.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.masking import assistant_mask
from shared.finetune.chat.messages import ChatError, Message, text_of
from shared.finetune.chat.spans import Span, render_answers
from shared.finetune.chat.template import ChatTemplate, TemplateError
from shared.finetune.chat.unread import Unread

MARK = "\U0010fffe"  # no character of Unicode
Pieces = list[tuple[str, bool]]  # of a text, each with whether it is trained on


class Encoded(NamedTuple):
    """Ids of a text, and for each the characters that it stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class ChatEncoder:
    """Encodes rendered chats.

    Args:
        tokenizer: whose special tokens the template writes.

    Attributes:
        special: finds a special token that the template has written in a rendered text.
    """

    def __init__(self, tokenizer: TextTokenizer):
        names = sorted(tokenizer.special_ids, key=len, reverse=True)
        self.tokenizer = tokenizer
        self.special = re.compile("|".join(map(re.escape, names)))
        self.broken = re.compile("(" + "|".join(re.escape(name[:1] + MARK + name[1:]) for name in names) + ")")
        self.of_templates = Tokenizer.from_str(with_exact_names(tokenizer.tokenizer.to_str()))  # text becomes special tokens here
        # It adds no tokens here; of GPT-2's kind it takes spaces out of the offsets, and an answer's newlines would not be trained.
        self.of_templates.post_processor = None

    def guarded(self, value: Any) -> Any:
        """Messages, or any value in them, in which names of special tokens are broken up."""
        if isinstance(value, str):
            return self.special.sub(lambda found: found[0][:1] + MARK + found[0][1:], value)
        if isinstance(value, dict):
            return {name: self.guarded(each) for name, each in value.items()}
        return [self.guarded(each) for each in value] if isinstance(value, list) else value

    def plain(self, text: str) -> str:
        """A rendered text without the marks."""
        return self.broken.sub(lambda found: found[0].replace(MARK, "", 1), text)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Ids of rendered texts, on all cores; offsets count a text's characters with its marks."""
        whole = [text for text in texts if MARK not in text]
        encoded = iter(self.of_templates.encode_batch(whole, add_special_tokens=False))
        return [Encoded(each.ids, each.offsets) for text in texts if (each := self.pieces(text) if MARK in text else next(encoded))]

    def pieces(self, text: str) -> Encoded:
        """A text with broken names: what is between them as usual, they as ordinary text."""
        ids, offsets, place = [], [], 0
        for number, piece in enumerate(self.broken.split(text)):
            if number % 2:
                found = self.tokenizer.encode(piece.replace(MARK, "", 1))
                offsets += [(place, place + len(piece))] * len(found)
            else:
                encoding = self.of_templates.encode(piece, add_special_tokens=False)
                found = encoding.ids
                offsets += [(place + start, place + stop) for start, stop in encoding.offsets]
            ids += found
            place += len(piece)
        return Encoded(ids, offsets)

    def prompt(self, template: ChatTemplate, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """The ids that a model continues with its answer to messages."""
        text = template.render(self.guarded(list(messages)), generation_prompt=True, tools=self.guarded(tools))
        return self.encode([text])[0].ids


def with_exact_names(described: str) -> str:
    """A tokenizer's JSON in which special tokens are found by their names alone: else full-width letters of a message, which Unicode's
    NFKC makes plain, spell one behind the guard."""
    found = json.loads(described)
    wide = [token for token in found["added_tokens"] if token["special"] and token["normalized"]]
    for token in wide:
        token["normalized"] = False
    return json.dumps(found) if wide else described


@dataclass(frozen=True)
class Example:
    """ids, trained: [kept] of a conversation, cut. length: before that. byte_count: of its text. stops: special tokens that end answers.

    value: a number that is kept with it in the shard.
    """

    ids: np.ndarray
    trained: np.ndarray
    length: int
    byte_count: int
    turns: int
    stops: list[str]
    value: float = 0.0

    @property
    def kept(self) -> int:
        return len(self.ids)


class Examples:
    """Makes examples of conversations. rewritten: answers of earlier turns that lost their thinking in the template, and are only read."""

    def __init__(self, tokenizer: TextTokenizer, seq: int):
        self.tokenizer, self.seq, self.rewritten = tokenizer, seq, 0
        self.names = {number: name for name, number in tokenizer.special_ids.items()}

    def pieces(self, example: Example) -> Pieces:
        """An example as text."""
        grouped = groupby(zip(example.ids.tolist(), example.trained.tolist(), strict=True), key=lambda pair: pair[1])
        return [(self.tokenizer.decode([number for number, _ in some], keep_special=True), trained) for trained, some in grouped]


class ChatExamples(Examples):
    """Examples of conversations that a template renders. What comes after the last trained token is left out: nothing is learned from it.

    Args:
        seq: an example has at most seq + 1 tokens, which are seq predictions.
    """

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, seq: int):
        super().__init__(tokenizer, seq)
        self.template, self.encoder = template, ChatEncoder(tokenizer)
        self.unread = Unread(lambda asked: self.rendered(asked)[0])

    def __call__(self, conversations: Sequence[Conversation]) -> list[Example]:
        rendered = []
        for one in conversations:
            own = {name: self.encoder.guarded(getattr(one, name)) for name in ("messages", "tools", "arguments")}
            guarded = replace(one, **own)
            try:
                rendered.append(self.rendered(guarded))
            except TemplateError as error:
                raise TemplateError(f"{one.place}: {error}") from None
            self.unread.note(guarded, rendered[-1][0])
            if not self.template.for_tools(one.tools).says_generated:
                self.rewritten += sum(map(one.is_trained, range(len(one.messages)))) - len(rendered[-1][1])
        made = []
        for one, (text, spans), encoded in zip(conversations, rendered, self.encoder.encode([text for text, _ in rendered]), strict=True):
            ids, trained = np.array(encoded.ids), assistant_mask(encoded.offsets, spans).numpy()
            require_part(trained, one.place, self.template)
            ends = np.flatnonzero(trained & ~np.append(trained[1:], False))
            ids, trained = ids[: ends[-1] + 1], trained[: ends[-1] + 1]
            stops = [self.names[number] for number in ids[ends].tolist() if number in self.names]
            size = len(self.encoder.plain(text).encode())
            made.append(Example(ids[: self.seq + 1], trained[: self.seq + 1], len(ids), size, len(spans), stops))
        return made

    def rendered(self, asked: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation, and where its trained answers are."""
        template = self.template.for_tools(asked.tools)
        template.require_shown(asked.call())
        return render_answers(template, self.encoder.special, asked)


class PairExamples(Examples):
    """Pairs for an encoder-decoder: what is said before the last answer, and the answer, each with the end token.

    Each text has at most seq tokens. One that is read keeps its end token when it is cut; one that is written does not, or the model would
    learn to end in the middle.
    """

    def __init__(self, tokenizer: TextTokenizer, seq: int):
        super().__init__(tokenizer, seq)
        self.unread = Unread(lambda asked: text_of(asked.messages))  # nothing but contents is read of messages

    def __call__(self, conversations: Sequence[Conversation]) -> list[Example]:
        texts = []
        for one in conversations:
            last = max(filter(one.is_trained, range(len(one.messages))))
            read = text_of(one.messages[:last])
            if not read or not one.messages[last].get("content"):
                raise ChatError(f"{one.place} is no pair of texts: it needs words to read, and then an answer.")
            if one.tools or any(message.get("tool_calls") for message in one.messages):
                raise ChatError(f"{one.place} has tools or calls of them, which a pair of texts does not show: give a chat template.")
            self.unread.note(one, text_of(one.messages))
            texts += [read, one.messages[last]["content"]]
        encoded, end, made = self.tokenizer.encode_batch_fast(texts), [self.tokenizer.end_id], []
        for place in range(0, len(texts), 2):
            read = np.concatenate([encoded[place][: self.seq - 1], end])
            written = np.concatenate([encoded[place + 1], end])[: self.seq]
            length = len(encoded[place]) + len(encoded[place + 1]) + 2
            trained = np.arange(len(read) + len(written)) >= len(read)
            size = len("".join(texts[place : place + 2]).encode())
            made.append(Example(np.concatenate([read, written]), trained, length, size, 1, [self.tokenizer.end]))
        return made


def require_part(trained: np.ndarray, place: str, template: ChatTemplate) -> None:
    """Reject a mask that trains on nothing, or on everything including the prompt."""
    if trained.all() or not trained.any():
        what = "trains on every token, the prompt too" if trained.all() else "leaves no token to train on"
        raise ChatError(f"{place}: the chat template {template.name} {what}: look at where it says {{% generation %}}.")
