"""Chapter 12. Chat with a trained model in the terminal: streaming answers, its own template, history cut to the context by whole turns.

    course chat runs/laptop_sft          a run, finished or not; also a folder of Hugging Face's format
    you: What is 3 plus 4?
    7

A model without a chat template, such as a pretrained one, continues each line by itself. An encoder-decoder writes one text for each that
it reads. Lines may be piped in.
"""

import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from shared.course import terminal
from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.template import FILE, ChatTemplate, Message
from shared.finetune.peft_format import load_adapter
from shared.finetune.soft_prompts import count_virtual_tokens
from shared.model.hf.files import read_json
from shared.model.hf.generation import START
from shared.model.transformer import TransformerModel
from shared.moe.config import MixtureModelConfig
from shared.rl.generation import Drawing as TokenDrawing
from shared.rl.generation import stream_answer
from shared.trainer import provenance
from shared.trainer.initial_weights import find_initial_weights

RESET = "/reset"
UNFINISHED = "\ufffd"  # the replacement character, which a decoder shows of a character whose bytes are not all there


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn. temperature: 0 takes the likeliest token. top_k: among how many. new_tokens: at most, in an answer."""

    temperature: float = 0.7
    top_k: int | None = 40
    new_tokens: int = 128
    seed: int = 0


@dataclass
class Talk:
    """A model that is talked to, and what was said. template: None for a model that continues text. dropped: turns that the context had no
    room for."""

    model: TransformerModel
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    drawing: Drawing = Drawing()
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.drawing.seed)
        self.context = self.model.config.max_position_embeddings - count_virtual_tokens(self.model)
        self.is_pair = self.model.config.architecture == "encoder-decoder"
        ends = self.model.token_ids.get("eos_token_id")
        names = [name for name in (self.template.special_names if self.template else []) if name in self.tokenizer.special_ids]
        turns = {self.tokenizer.special(name) for name in names}  # any of them ends an answer: it ends this turn or begins another
        self.stops = {self.tokenizer.end_id, *turns, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}

    def reset(self) -> None:
        self.messages, self.dropped = [], 0

    def answer(self, text: str) -> Iterator[str]:
        """What the model says to a text, piece by piece. It is remembered when it is complete.

        Raises:
            CourseError: the text has no room in the context, or the template refuses it.
        """
        turn = {"role": "user", "content": text}
        prompt = self.fitting(turn)
        ids: list[int] = []
        shown = ""
        seed = int(torch.randint(2**62, (), generator=self.generator))  # another one for each answer
        for token in stream_answer(
            self.model, prompt, self.drawing.new_tokens, context=self.model.config.max_position_embeddings, stops=self.stops,
            start_id=self.start_id(), drawing=TokenDrawing(self.drawing.temperature, self.drawing.top_k), seeds=[seed],
        ):  # fmt: skip
            ids.append(token)
            said = self.tokenizer.decode(ids)
            if not said.endswith(UNFINISHED):
                yield said[len(shown) :]
                shown = said
        yield self.tokenizer.decode(ids)[len(shown) :]
        if self.template:
            self.messages += [turn, {"role": "assistant", "content": self.tokenizer.decode(ids)}]

    def start_id(self) -> int | None:
        """What the decoder of an encoder-decoder reads first."""
        return (self.model.token_ids.get(START) or 0) if self.is_pair else None

    def fitting(self, turn: Message) -> list[int]:
        """The ids of the prompt. The oldest turns are forgotten, question and answer together, until there is room for an answer too."""
        room = max(1, self.context - min(self.drawing.new_tokens, self.context // 2))
        while len(ids := self.prompt([*self.messages, turn])) > room and self.messages:
            self.messages, self.dropped = self.messages[2:], self.dropped + 1
        if len(ids) >= self.context or not ids:
            what = f"{len(ids):,} tokens, and the model reads {self.context:,} with the answer" if ids else "no token in the vocabulary"
            raise CourseError(f"This message has {what}: write another one.")
        return ids

    def prompt(self, messages: list[Message]) -> list[int]:
        if self.template is None:
            ids = self.tokenizer.encode(messages[-1]["content"])
            return [*ids, self.tokenizer.end_id] if self.is_pair and ids else ids
        before = [{"role": "system", "content": self.system}] if self.system else []
        return ChatEncoder(self.tokenizer).prompt(self.template, [*before, *messages])


def open_talk(path: Path, drawing: Drawing, system: str | None) -> Talk:
    """The model of a run or of a folder.

    Raises:
        CourseError: there is none.
    """
    adapter = path / "adapter"
    if (adapter / "adapter_config.json").is_file() and not (path / "model").exists():  # virtual tokens, which are in no weight
        record = provenance.read_record(path / provenance.CONFIG)
        start = find_initial_weights(Path(str(record.get("start_from"))))
        size = (record.get("model") or {}).get("vocab_size", start.model.vocab_size)
        model = start.load(MixtureModelConfig(**vars(replace(start.model, vocab_size=size))), apart=True)
        load_adapter(model, adapter)
        folder, tokenizer = adapter, TextTokenizer.load(adapter)
    else:
        start = find_initial_weights(path, "RUN")
        model, tokenizer, folder = start.load(), start.text_tokenizer(), start.tokenizer_folder()
    config = folder / "tokenizer_config.json"
    has_template = (folder / FILE).is_file() or (config.is_file() and "chat_template" in read_json(config))
    template = ChatTemplate.load(folder) if has_template else None
    if template:
        template.variables.setdefault("eos_token", tokenizer.end)
    return Talk(model.eval(), tokenizer, template, drawing, system if template else None)


def talk(console: Console, run: str, system: str | None, drawing: Drawing) -> None:
    """Read lines and answer them, until there are no more."""
    talking = open_talk(Path(run).expanduser(), drawing, system)
    if sys.stdin.isatty():
        kind = "It answers in turns" if talking.template else "It has no chat template, so it continues each line"
        terminal.say(console, f"{kind}. {RESET} forgets what was said; Ctrl-D ends.")
    try:
        while (line := read_line()) is not None:
            if line.strip() == RESET:
                talking.reset()
                terminal.say(console, "Forgotten.")
            elif line.strip():
                print_answer(console, talking, line.rstrip("\n"))
    except KeyboardInterrupt:
        print()


def print_answer(console: Console, talking: Talk, line: str) -> None:
    dropped = talking.dropped
    try:
        for piece in talking.answer(line):
            print(printable(piece), end="", flush=True)
        print()
    except CourseError as error:
        terminal.say(console, str(error), "red")
    if talking.dropped > dropped:
        terminal.say(console, f"({talking.dropped} of the oldest turns are out of the model's context now.)")


def printable(text: str) -> str:
    """The text with a replacement character for each control or format character but tab and newline: a terminal would obey those."""
    return "".join(UNFINISHED if unicodedata.category(each)[0] == "C" and each not in "\t\n" else each for each in text)


def read_line() -> str | None:
    """The next line; None where there are no more."""
    try:
        return input("you: " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
