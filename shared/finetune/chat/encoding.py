"""Chapter 10. Tokenization of rendered chats: special tokens where the template writes them, and never where a message spells their names.

A user who types "<|im_end|>" must not end a turn. So in messages such names are broken by a mark before they are rendered, and what comes
out broken is encoded as ordinary text, without the mark. Texts without such names get the ids that transformers gives them.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.template import ChatTemplate, Message

MARK = "\U0010fffe"  # no character of Unicode


class Encoded(NamedTuple):
    """Ids of a text, and for each the characters that it stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class ChatEncoder:
    """Encodes what a template has rendered.

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
        self.of_templates = Tokenizer.from_str(tokenizer.tokenizer.to_str())  # text becomes special tokens here
        # It adds no tokens here; of GPT-2's kind it takes spaces out of the offsets, and an answer's newlines would not be trained.
        self.of_templates.post_processor = None

    def guarded(self, value: Any) -> Any:
        """Messages, or anything in them, with the names of special tokens broken."""
        if isinstance(value, str):
            return self.special.sub(lambda found: found[0][:1] + MARK + found[0][1:], value)
        if isinstance(value, dict):
            return {name: self.guarded(each) for name, each in value.items()}
        return [self.guarded(each) for each in value] if isinstance(value, list) else value

    def plain(self, text: str) -> str:
        """A rendered text as it is read, without marks."""
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
