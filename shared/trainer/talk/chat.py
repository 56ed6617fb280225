"""Chapter 12. Chat with a trained model in the terminal: streaming answers, its own template, history cut to the context by whole turns.

    course chat runs/laptop_sft          a run, finished or not; also a folder of Hugging Face's format, or with GPTQ's or AWQ's codes
    you: What is 3 plus 4?
    7

A model without a chat template, such as a pretrained one, continues each line by itself. An encoder-decoder writes one text for each that
it reads. Lines may be piped in. `course sample` answers one prompt; `shared.trainer.talk.server` is the same conversation in a browser.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from tokenizers.decoders import DecodeStream

from shared.course import terminal
from shared.course.bounds import Length, PositiveInt, Seed, checked
from shared.course.errors import CourseError
from shared.course.typed import SURROGATES
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.messages import Message
from shared.finetune.chat.template import ChatTemplate, has_template
from shared.finetune.soft_prompts import count_virtual_tokens
from shared.model.hf.files import START, PretrainedError
from shared.model.transformer import TransformerModel
from shared.rl.generation import Drawing, stream_answer
from shared.trainer.talk.opened import opened

RESET = "/reset"
LONGEST_STOP = 1_000  # characters
UNFINISHED = terminal.REPLACEMENT  # a decoder shows it of a character whose bytes are not all there


@dataclass(frozen=True)
@checked
class AnswerSettings:
    """How answers are drawn.

    Args:
        drawing: temperature, top-k, top-p, min-p and repetition penalty.
        new_tokens: of an answer at most.
        stop: strings that end an answer, which then ends before the first of them.
        seed: of what is drawn.

    Raises:
        ValueError: names the setting.
    """

    drawing: Drawing = Drawing(temperature=0.7, top_k=40)  # noqa: RUF009 (frozen)
    new_tokens: PositiveInt = 128
    stop: Annotated[tuple[str, ...], Length(64)] = ()
    seed: Seed = 0

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once: leave it out.")
        if (longest := max(map(len, self.stop), default=0)) > LONGEST_STOP:
            raise ValueError(f"stop has a string of {longest:,} characters: give at most {LONGEST_STOP:,}.")


@dataclass
class Talk:
    """A model that is talked to, and what was said.

    template: None for a model that continues text. dropped: turns that the context had no room for. tokens: of the last answer. cut_off:
    whether the last answer reached `new_tokens` or the end of the context before it was complete. encoder: of prompts; None to make it.
    """

    model: TransformerModel
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    settings: AnswerSettings = AnswerSettings()
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0
    tokens: int = 0
    cut_off: bool = False
    encoder: ChatEncoder | None = None

    def __post_init__(self) -> None:
        if self.template and self.encoder is None:
            self.encoder = ChatEncoder(self.tokenizer)  # copies of this conversation share it
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.context = self.model.config.max_position_embeddings - count_virtual_tokens(self.model)
        self.is_pair = self.model.config.architecture == "encoder-decoder"
        ends = self.model.token_ids.get("eos_token_id")
        names = [name for name in (self.template.special_names if self.template else []) if name in self.tokenizer.special_ids]
        turns = {self.tokenizer.special(name) for name in names}  # any of them ends an answer: it ends this turn or begins another
        self.stops = {self.tokenizer.end_id, *turns, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}

    def reset(self) -> None:
        self.messages, self.dropped = [], 0

    def answer(self, text: str) -> Iterator[str]:
        """What the model says to a text: a piece for each token, "" where it completes no character. Remembered when it is complete.

        Raises:
            CourseError: the text has no room in the context, or the template refuses it.
        """
        turn = {"role": "user", "content": text}
        prompt, settings = self.fitting(turn), self.settings
        room = self.context - (1 if self.is_pair else len(prompt)) + 1
        ids: list[int] = []
        said, held, stopped = "", "", False  # held: what may begin a stop string
        pieces = DecodeStream(skip_special_tokens=True)
        seed = int(torch.randint(2**62, (), generator=self.generator))  # another one for each answer
        for token in stream_answer(
            self.model, prompt, settings.new_tokens, context=self.model.config.max_position_embeddings, stops=self.stops,
            start_id=self.start_id(), drawing=settings.drawing, seeds=[seed],
        ):  # fmt: skip
            ids.append(token)
            held += pieces.step(self.tokenizer.tokenizer, token) or ""
            yield (ready := before_stop(held, settings.stop))
            said += ready
            if stopped := any(each in held for each in settings.stop):
                break
            held = held[len(ready) :]
        if not stopped and (rest := self.tokenizer.decode(ids)[len(said) :]):  # half a stop string, or half a character
            yield rest
            said += rest
        self.tokens, self.cut_off = len(ids), not stopped and len(ids) == min(settings.new_tokens, room)
        if self.template:
            self.messages += [turn, {"role": "assistant", "content": said}]

    def start_id(self) -> int | None:
        """What the decoder of an encoder-decoder reads first."""
        return (self.model.token_ids.get(START) or 0) if self.is_pair else None

    def fitting(self, turn: Message) -> list[int]:
        """The ids of the prompt, without the oldest turns (question and answer together) if an answer would not fit otherwise.

        The newest turns are tried first, each time about twice as many: what is not read costs nothing, however much was said.
        """
        room, pairs = max(1, self.context - min(self.settings.new_tokens, self.context // 2)), len(self.messages) // 2
        self.require_readable(turn)
        kept, most, ids = 0, self.pairs_within_reach(), self.prompt([turn])
        unknown = most  # while no number of pairs is known to be too many
        while len(ids) <= room and kept < most:
            tried = min(2 * kept + 1, most) if most == unknown else (kept + most + 1) // 2
            longer = self.prompt([*self.messages[2 * (pairs - tried) :], turn])
            if len(longer) <= room:
                kept, ids = tried, longer
            else:
                most = tried - 1
        self.messages, self.dropped = self.messages[2 * (pairs - kept) :], self.dropped + pairs - kept
        if len(ids) >= self.context or not ids:
            what = f"{len(ids):,} tokens, and the model reads {self.context:,} with the answer" if ids else "no token in the vocabulary"
            raise CourseError(f"This message has {what}: write another one.")
        return ids

    def require_readable(self, turn: Message) -> None:
        """Refuse a text that is no UTF-8, or more than the context can hold, before it is tokenized."""
        text = f"{self.system or ''}{turn['content']}"
        if SURROGATES.search(text):
            raise CourseError("This message is not UTF-8: write another one.")
        if len(text) > self.reach:
            raise CourseError(
                f"This message has {len(text):,} characters, and the model reads {self.context:,} tokens with the answer: write another "
                "one."
            )

    @property
    def reach(self) -> int:
        """The characters that the context can hold, if each token were the longest."""
        return self.context * max(1, int(self.tokenizer.byte_lengths.max()))

    def pairs_within_reach(self) -> int:
        """How many of the newest turns the context can hold at most."""
        sizes = accumulate(len(each["content"]) for each in reversed(self.messages))
        return sum(size <= self.reach for size in sizes) // 2

    def prompt(self, messages: list[Message]) -> list[int]:
        if self.template is None:
            ids = self.tokenizer.encode(messages[-1]["content"])
            return [*ids, self.tokenizer.end_id] if self.is_pair and ids else ids
        before = [{"role": "system", "content": self.system}] if self.system else []
        return self.encoder.prompt(self.template, [*before, *messages])


def open_talk(path: Path, settings: AnswerSettings, system: str | None, plain: bool = False) -> Talk:
    """The model of a run or of a folder. plain: leave its chat template out, so that it continues text."""
    try:
        model, tokenizer, folder = opened(path)
    except PretrainedError as error:
        raise CourseError(str(error)) from None
    template = ChatTemplate.load(folder) if has_template(folder) and not plain else None
    if template:
        template.variables.setdefault("eos_token", tokenizer.end)
    return Talk(model.eval(), tokenizer, template, settings, system if template else None)


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """The part of a growing text that is safe to show: up to the first stop string, without a prefix of one or half a character."""
    if found := [text.index(each) for each in stop if each in text]:
        return text[: min(found)]
    text = text.rstrip(UNFINISHED)
    return text[: len(text) - max((begun(text, each) for each in stop), default=0)]


def begun(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string."""
    last = text[-1:]
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop[size - 1] == last and text.endswith(stop[:size])), 0)


def talk(console: Console, run: str, system: str | None, settings: AnswerSettings, plain: bool = False) -> None:
    """Read lines and answer them, until there are no more."""
    talking = open_talk(Path(run).expanduser(), settings, system, plain)
    if sys.stdin.isatty():
        kind = "It answers in turns" if talking.template else "It continues each line, without a chat template"
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


def sample(run: str, prompt: str, number: int, system: str | None, settings: AnswerSettings, plain: bool = False) -> None:
    """Print answers to one prompt, an empty line between two; each has a random stream of its own."""
    talking = open_talk(Path(run).expanduser(), settings, system, plain)
    for count in range(number):
        if count:
            print()
        print_pieces(talking.answer(prompt))
        talking.reset()


def print_answer(console: Console, talking: Talk, line: str) -> None:
    dropped = talking.dropped
    try:
        print_pieces(talking.answer(line))
    except CourseError as error:
        terminal.say(console, str(error), "red")
    if talking.dropped > dropped:
        terminal.say(console, f"({talking.dropped} of the oldest turns are out of the model's context now.)")


def print_pieces(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(terminal.printable(piece), end="", flush=True)
    print()


def read_line() -> str | None:
    """The next line; None where there are no more."""
    try:
        return input("you: " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
