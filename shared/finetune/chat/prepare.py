"""Chapter 10. Preparation of fine-tuning data: conversations as shards of tokens, each marked as trained or only read.

Everything is in a folder named after the configuration, the sources' content, the template, the tokenizer and the row's length, so the same
is prepared once. `report.json` is written last: without it the preparation starts over, and writes the same bytes.

    training/00000.tokens.safetensors ..., held_out/...      the shards, with the array `trained` (`shared.data.shards`)
    tokenizer.json, tokenizer_config.json, chat_template.jinja      what made them
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from shared.course.bounds import Fraction, checked
from shared.course.errors import CourseError
from shared.data.prepare import DIGESTS, SIDES
from shared.data.shards import TokenStore
from shared.data.sources import Digests, identity
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import ChatSource, open_chats_of
from shared.finetune.chat.encoding import ChatExamples, PairExamples
from shared.finetune.chat.sides import SideWriter
from shared.finetune.chat.template import FILE, ChatTemplate, has_template
from shared.folder_lock import FolderLock
from shared.output_files import require_writable, write_atomically

FORMAT = 3  # of the folder; another one means that the same conversations must be prepared again
BATCH = 64  # conversations that are tokenized together
SHOWN = 3  # conversations that the report shows
NAMED = 20  # unread fields that it names
PAIRS = "pairs"  # in place of a template: text to text
AUTO = "auto"  # the model's own template, or else chatml


@dataclass(frozen=True)
@checked
class ChatConfig:
    """Conversations to fine-tune on.

    Args:
        sources: where they come from, one after the other.
        template: auto for the one beside the tokenizer, which is the model's own, and chatml where it has none; chatml, the file or folder
            of a template, or null for the model's own alone; pairs for an encoder-decoder, which reads what comes before the last answer
            and writes the answer.
        tokenizer: the folder of the model's tokenizer; null for that of the model that training starts from.
        system: the system prompt of conversations that have none.
        held_out_share: share of the conversations that is held out for evaluation; those with the same first words are on one side.
    """

    sources: tuple[ChatSource, ...] = ()
    template: str | None = AUTO
    tokenizer: Path | None = None
    system: str | None = None
    held_out_share: Fraction = 0.05

    def __post_init__(self) -> None:
        if self.template is not None and not self.template.strip():
            raise ValueError("template is empty: give auto, chatml, a file or folder, pairs, or null for the one beside the tokenizer.")


@dataclass
class ChatReport:
    """Statistics of a preparation.

    examples, held_out: conversations on each side. turns: their answers. read, trained: tokens, as stored. truncated: cut to the row.
    dropped: truncation left nothing to train on. longest: tokens before truncation. stops: special tokens that end answers. unread: fields
    that stand in no text, and how often they occur. rewritten: earlier answers that are only read, as the template drops their thinking.
    shown: a few conversations as pieces of text, each with whether it is trained on.
    """

    examples: int = 0
    held_out: int = 0
    turns: int = 0
    read: int = 0
    trained: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0
    stops: list[str] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)
    rewritten: int = 0
    shown: list[list[tuple[str, bool]]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text, with the trained parts of the shown conversations between [[ and ]]."""
        share = self.trained / max(1, self.read)
        marked = ["".join(f"[[{text}]]" if trained else text for text, trained in pieces) for pieces in self.shown]
        return [
            f"{self.examples:,} conversations to train on and {self.held_out:,} held out, with {self.turns:,} answers.",
            f"{self.trained:,} of {self.read:,} tokens are trained on ({share:.0%}); the longest conversation has {self.longest:,}.",
            f"{self.truncated:,} were cut to the row, and {self.dropped:,} dropped, of which the row holds no answer.",
            *["No answer ends with a special token that is trained on, so the model will not learn to stop."] * (not self.stops),
            *self.remarks(),
            *marked,
        ]

    def remarks(self) -> list[str]:
        """What the template left out: fields that no text shows, and earlier answers that are only read."""
        named = [f"{name if name.isprintable() else repr(name)} ({count:,})" for name, count in list(self.unread.items())[:NAMED]]
        more = [f"and {len(self.unread) - NAMED:,} more"] * (len(self.unread) > NAMED)
        fields = [f"Fields that stand in no text and change nothing: {', '.join([*named, *more])}."] if self.unread else []
        lost = f"{self.rewritten:,} answers of earlier turns lost their thinking in the chat template, and are only read."
        return fields + [lost] * (self.rewritten > 0)


@dataclass(frozen=True)
class PreparedChats:
    """Prepared fine-tuning data. template: None for pairs."""

    folder: Path
    training: TokenStore
    held_out: TokenStore
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    report: ChatReport


Prepared = TypeVar("Prepared", bound=PreparedChats)


def prepare_chats(config: ChatConfig, output: Path, seq: int, console: Console | None = None) -> PreparedChats:
    """Prepare conversations, unless that is done already.

    Args:
        output: the folder of all preparations; this one gets a folder in it.
        seq: tokens that a row predicts; a conversation is cut after seq + 1 tokens, and left out if no trained one is left. Of pairs, each
            text is cut so.
        console: where a progress bar goes, if it is a terminal.
    """
    return open_chats(prepared_folder(config, output, seq, console, "chats", write_chats))


Write = Callable[[ChatConfig, Path, int, TextTokenizer, ChatTemplate | None, Callable[[int], None]], ChatReport]


def prepared_folder(config: ChatConfig, output: Path, seq: int, console: Console | None, section: str, write: Write) -> Path:
    """The folder in which `write` has left the shards of both sides, with what made them and its report.

    Args:
        section: of the configuration; the folder's name begins with it.

    For the others, and what is raised, see `prepare_chats`.
    """
    if not config.sources:
        raise CourseError(f"There are no conversations to train on: give {section}.sources, such as [{{path: FILE}}].")
    if config.tokenizer is None:
        raise CourseError(f"There is no tokenizer: give the folder of the model's in {section}.tokenizer.")
    console = console or Console(quiet=True)
    if config.template == PAIRS:
        tokenizer, template = TextTokenizer.load(config.tokenizer), None
    else:
        tokenizer, template = chat_tokenizer(config.tokenizer, config.template)
    digests = Digests(output / DIGESTS)
    folder = output / f"{section}-{fingerprint(config, seq, tokenizer, template, digests.of)}"
    if not folder.is_dir():
        require_writable(output)
    digests.save()
    say = lambda sentence: console.print(sentence, markup=False, highlight=False)  # noqa: E731
    columns = (TextColumn("preparing conversations"), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with nullcontext() if (folder / "report.json").exists() else FolderLock(folder, wait=True, say=say):
        if not (folder / "report.json").exists():
            with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
                task = bar.add_task("", total=None)
                report = write(config, folder, seq, tokenizer, template, lambda count: bar.advance(task, count))
            write_beside(folder, tokenizer, template)
            write_atomically(folder / "report.json", json.dumps(asdict(report)).encode())
    return folder


def chat_tokenizer(folder: Path, template: str | None) -> tuple[TextTokenizer, ChatTemplate]:
    """The tokenizer of a folder or file with the special tokens of a template, and the template; `ChatConfig` says what may name it."""
    tokenizer = TextTokenizer.load(folder)
    tokenizer.require_lossless()
    beside = folder_of(Path(folder).expanduser())
    if template == AUTO:
        template = None if has_template(beside) else "chatml"
    found = ChatTemplate.load(template or beside, beside)
    found.variables.setdefault("eos_token", tokenizer.end)
    return tokenizer.with_special(found.special_names), found


def write_chats(
    config: ChatConfig, folder: Path, seq: int, tokenizer: TextTokenizer, template: ChatTemplate | None, advance: Callable[[int], None]
) -> ChatReport:
    """Write the shards of both sides."""
    report, writer = ChatReport(), SideWriter(folder, tokenizer, config.held_out_share, names_of(config.sources), "chats")
    make = ChatExamples(tokenizer, template, seq) if template else PairExamples(tokenizer, seq)
    conversations = (each.with_system(config.system) for source in config.sources for each in open_chats_of(source))
    stops: dict[str, None] = {}
    while some := list(islice(conversations, BATCH)):
        for conversation, example in zip(some, make(some), strict=True):
            report.turns += example.turns
            report.longest = max(report.longest, example.length)
            report.truncated += example.length > example.kept
            stops |= dict.fromkeys(example.stops)
            if not example.trained[1:].any():
                report.dropped += 1
                continue
            report.read += len(example.ids)
            report.trained += int(example.trained[1:].sum())
            if len(report.shown) < SHOWN:
                report.shown.append(make.pieces(example))
            writer.add(conversation.prompt_digest(), example)
        advance(len(some))
    if not writer.added:
        late = f"of {report.dropped:,}, each has its first answer after the row's {seq:,} tokens"
        what = f"{late}. Give other conversations, or a larger seq" if report.dropped else "there is no record. Give some"
        raise CourseError(f"{names_of(config.sources)} leaves no conversation to train on: {what}.")
    counts = writer.finish()
    report.examples, report.held_out, report.stops = counts["training"], counts["held_out"], list(stops)
    report.unread, report.rewritten = dict(make.unread.counts.most_common()), make.rewritten
    return report


def write_beside(folder: Path, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
    """Write what made the shards: the tokenizer, the names of its special tokens, and the template."""
    said = tokenizer.names | (template.variables if template else {}) | {"eos_token": tokenizer.end}
    write_atomically(folder / "tokenizer_config.json", json.dumps(said).encode())
    write_atomically(folder / "tokenizer.json", tokenizer.to_json().encode())
    if template:
        template.save(folder)


def open_chats(folder: Path) -> PreparedChats:
    """Open prepared conversations. folder: of this one preparation."""
    return opened(folder, PreparedChats, ChatReport)


def opened(folder: Path, prepared: type[Prepared], report_class: type[ChatReport]) -> Prepared:
    """Open a folder of `prepared_folder` as an object of these classes."""
    tokenizer = TextTokenizer.load(folder)
    stores = {side: TokenStore(folder / side, tokenizer.identity) for side in SIDES}
    template = ChatTemplate.load(folder) if (folder / FILE).exists() else None
    try:
        report = report_class(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        cure = "delete it, and the same command prepares the conversations again"
        raise CourseError(f"{folder / 'report.json'} is damaged ({error}): {cure}.") from None
    return prepared(folder, stores["training"], stores["held_out"], tokenizer, template, report)


def names_of(sources: Sequence[ChatSource]) -> str:
    """The names of the sources, for error messages."""
    return ", ".join(source.path for source in sources)


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def fingerprint(
    config: ChatConfig, seq: int, tokenizer: TextTokenizer, template: ChatTemplate | None, digest: Callable[[Path], str]
) -> str:
    """The end of the folder's name: a hash of everything that decides what is in it."""
    decisive = {
        "format": FORMAT,
        "sources": [identity(source, digest) for source in config.sources],
        "settings": [config.system, config.held_out_share, seq],
        "tokenizer": [tokenizer.identity, tokenizer.end],
        "template": template and [template.source, template.variables, *([template.tool_use.source] if template.tool_use else [])],
        "libraries": [metadata.version(name) for name in ("tokenizers", "jinja2")],
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
