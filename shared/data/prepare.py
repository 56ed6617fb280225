"""Chapter 03. Data preparation, from raw text to token shards: read, clean, split, tokenize, store.

The output folder is keyed by the configuration and the content of the text, so the same preparation is found complete, and another one
never overwrites it. Of two processes with the same preparation, one blocks on the other. Files are written atomically; an interrupted
preparation, even a killed one, resumes after the last complete file, and ends with the same bytes.

    clean/00000.parquet ...      cleaned text, with the names of its documents (`shared.data.clean_shards`)
    tokenizer.json               trained on it, or copied from the one that was given, with the name of its end token beside it
    training/00000.tokens.safetensors ..., held_out/...      the shards (`shared.data.shards`)
    report.json, report.png      what cleaning did

Left out on purpose: several machines. Prepare text once, and copy it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shared.course.bounds import Bounds, Fraction, PositiveInt, checked
from shared.course.extensions import Extension, content_hash, is_import_path
from shared.data.cleaning.cleaner import ENGLISH, CleaningConfig
from shared.data.cleaning.report import CleaningReport
from shared.data.clean_shards import CleanShards
from shared.data.sources import Digests, identity
from shared.data.shards import ENDING, TokenStore, write_shard
from shared.data.source import Source
from shared.data.tokenizer import BYTES, TextTokenizer, TokenizerError, special_names
from shared.folder_lock import FolderLock
from shared.output_files import require_writable, write_atomically

SMALLEST_VOCABULARY = len(special_names(0)) + BYTES  # without sentinels
FORMAT = 2  # of the whole folder; another one means that the same text must be prepared again
LIBRARIES = ("tokenizers", "ftfy", "py3langid")  # whose versions change what comes out
DIGESTS = "sources.json"  # beside the folders: content hashes of the sources' files
SIDES = {"training": False, "held_out": True}


@dataclass(frozen=True)
@checked
class PrepareConfig:
    """What to prepare and how.

    Args:
        sources: where the text comes from, one after the other. With a weight each, such as [{path: code, weight: 7},
            {path: prose, weight: 3}], a mixture: 70 and 30 % of the training tokens.
        cleaning: which stages clean it.
        held_out_share: share of the documents that is held out for evaluation, chosen by their names.
        tokenizer: a tokenizer.json, or a folder with one, to use; null to train one.
        vocab_size: of the tokenizer to train.
        sentinels: how many tokens for T5's spans it gets.
        tokenizer_bytes: bytes of training text to train it on, spread over all documents.
        part_bytes: bytes of text in a part and its shard, which is what is held in memory.
        workers: processes that clean; 0 to clean in this one.
    """

    sources: tuple[Source, ...] = (Source(),)
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    held_out_share: Fraction = 0.05
    tokenizer: Path | None = None
    vocab_size: Annotated[int, Bounds(ge=1, le=10_000_000)] = 4096
    sentinels: Annotated[int, Bounds(ge=0, le=100_000)] = 100
    tokenizer_bytes: PositiveInt = 2**25
    part_bytes: PositiveInt = 2**25
    workers: Annotated[int, Bounds(ge=0, le=1_024)] = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("There are no sources: give at least one.")
        if 0 < sum(source.weight is None for source in self.sources) < len(self.sources):
            raise ValueError("Some sources have a weight and some have none: give one to each of prepare.sources, or to none.")
        kinds = [vars(source) | {"weight": None, "path": os.path.realpath(os.path.expanduser(source.path))} for source in self.sources]
        if twice := [source.path for source, kind in zip(self.sources, kinds, strict=True) if kinds.count(kind) > 1]:
            raise ValueError(f"prepare.sources holds {twice[-1]} twice: give each source once, and a weight if it is to count more.")
        if self.tokenizer is None and self.vocab_size < (least := SMALLEST_VOCABULARY + self.sentinels):
            raise ValueError(f"vocab_size is {self.vocab_size}: give at least {least} (with {self.sentinels} sentinels and bytes).")


@dataclass(frozen=True)
class PreparedText:
    """What a training needs: the stores, the tokenizer, and the report. documents: of each source, among those to train on."""

    folder: Path
    training: TokenStore
    held_out: TokenStore
    tokenizer: TextTokenizer
    report: CleaningReport
    documents: list[int]


def prepare(config: PrepareConfig, output: Path, console: Console | None = None) -> PreparedText:
    """Prepare text, or find it prepared.

    Args:
        output: the folder of all preparations; this one gets a folder in it.
        console: where a progress bar goes, if it is a terminal.

    Raises:
        CourseError: a source, the tokenizer, or a file of an earlier preparation cannot be used; or no text is left.
    """
    console = console or Console(quiet=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    digests = Digests(output / DIGESTS)
    folder = output / fingerprint(config, digests.of)
    if not folder.is_dir():
        require_writable(output)
    digests.save()
    parts = CleanShards(folder / "clean", config.held_out_share)
    say = lambda sentence: console.print(sentence, markup=False, highlight=False)  # noqa: E731
    lock = nullcontext() if finished(folder, parts) else FolderLock(folder, wait=True, say=say)  # finished text may be read-only
    with lock, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        if not parts.complete():
            advance = counter(bar, "cleaning", None)
            parts.make(config.sources, config.cleaning, config.part_bytes, config.workers, advance)
        report = parts.report()
        if not (folder / "report.png").exists():
            report.save(folder / "report.json")
            report.plot(folder / "report.png")
        tokenizer = tokenizer_of(config, folder, parts, bar)
        write_shards(folder, parts, tokenizer, bar)
    return open_prepared(folder, config)


def open_prepared(folder: Path, config: PrepareConfig) -> PreparedText:
    """Text that was prepared already, perhaps by another process: `folder` is that of this one preparation. Sources are not needed."""
    parts, tokenizer = CleanShards(folder / "clean", config.held_out_share), TextTokenizer.load(folder / "tokenizer.json")
    stores = {side: TokenStore(folder / side, tokenizer.identity) for side in SIDES}
    documents = parts.documents_of_sources(len(config.sources))
    return PreparedText(folder, stores["training"], stores["held_out"], tokenizer, parts.report(), documents)


def finished(folder: Path, parts: CleanShards) -> bool:
    """Whether every file is there."""
    files = ["report.png", "tokenizer.json"]
    return parts.complete() and all(
        (folder / file).exists() for file in files + [f"{side}/{number:05}{ENDING}" for side in SIDES for number in range(parts.count())]
    )


def fingerprint(config: PrepareConfig, digest: Callable[[Path], str]) -> str:
    """The name of the folder: a hash of everything that decides what is in it, the content of the sources among them, as `digest` gives
    it; not the files' times."""
    cleaning = asdict(config.cleaning) | {"stages": [identity_of_stage(stage) for stage in config.cleaning.stages]}
    if config.cleaning.stop_words == ENGLISH:  # as before there was a choice, so that text prepared then is found
        del cleaning["stop_words"]
    decisive = asdict(config) | {
        "cleaning": cleaning,
        "format": FORMAT,
        "sources": [identity(source, digest) for source in config.sources],
        "tokenizer": given(config.tokenizer) if config.tokenizer else None,
        "libraries": [metadata.version(name) for name in LIBRARIES],
    }
    del decisive["workers"]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def identity_of_stage(stage: str | Extension) -> str | list:
    """What must be equal for a cleaning stage to do the same; of one by import path, its file's content."""
    if isinstance(stage, Extension):
        return [content_hash(stage.name), stage.options]
    return [content_hash(stage), {}] if is_import_path(stage) else stage


def given(path: Path) -> list[str]:
    """What must be equal for a tokenizer to make the same data: itself, and the token that it ends a document with."""
    tokenizer = TextTokenizer.load(path)
    tokenizer.require_lossless()
    return [tokenizer.identity, tokenizer.end]


def tokenizer_of(config: PrepareConfig, folder: Path, parts: CleanShards, bar: Progress) -> TextTokenizer:
    """The folder's tokenizer: there already, the one that was given, or a new one."""
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return TextTokenizer.load(path)
        except TokenizerError as error:
            raise TokenizerError(f"{error} Or delete {folder}, and the same command prepares the text again.") from None
    if config.tokenizer:
        tokenizer = TextTokenizer.load(config.tokenizer)
        tokenizer.require_lossless(next(parts.documents(0, held_out=False))[1])
    else:
        advance = counter(bar, "training the tokenizer", min(config.tokenizer_bytes, parts.size("training")))
        tokenizer = TextTokenizer.train(sample(parts, config.tokenizer_bytes, advance), config.vocab_size, config.sentinels)
    if config.tokenizer:  # beside it and before it, because a tokenizer.json alone does not say what ends a document
        write_atomically(path.with_name("tokenizer_config.json"), json.dumps({"eos_token": tokenizer.end}).encode())
    write_atomically(path, tokenizer.to_json().encode())
    return TextTokenizer.load(path)


def sample(parts: CleanShards, size: int, advance: Callable[[int], None]) -> Iterator[str]:
    """Training documents of about `size` bytes in all, chosen by their names, so that every part of the text has its share."""
    share = size / parts.size("training")
    for number in range(parts.count()):
        for names, texts in parts.documents(number, held_out=False):
            for name, text in zip(names, texts, strict=True):
                drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[4:8]) / 2**32
                if drawn < share:
                    advance(len(text))
                    yield text


def write_shards(folder: Path, parts: CleanShards, tokenizer: TextTokenizer, bar: Progress) -> None:
    """Tokenize every part whose shard is missing. The library's threads use all cores."""
    advance = counter(bar, "tokenizing", parts.size("training") + parts.size("held_out"))
    for number in range(parts.count()):
        for side, held_out in SIDES.items():
            path = folder / side / f"{number:05}{ENDING}"
            if path.exists():
                continue
            documents, byte_counts = [], []
            for _, texts in parts.documents(number, held_out):
                encoded = tokenizer.encode_batch_fast(texts)
                documents += [np.append(ids, tokenizer.end_id).astype(np.uint32) for ids in encoded]
                byte_counts += [len(text.encode()) for text in texts]
                advance(sum(byte_counts[len(byte_counts) - len(texts) :]))
            write_shard(path, documents, byte_counts, tokenizer.identity, tokenizer.vocab_size)


def counter(bar: Progress, what: str, total: int | None) -> Callable[[int], None]:
    """A line of the progress bar: call it with the bytes that are done."""
    task = bar.add_task(what, total=total, done="")

    def advance(size: int) -> None:
        bar.advance(task, size)
        bar.update(task, done=f"{bar.tasks[task].completed / 1e6:.1f} MB")

    return advance
