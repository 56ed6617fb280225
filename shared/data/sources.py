"""Chapter 03. Data sources: files, folders, tables and datasets of the Hugging Face hub, streamed one document at a time.

`open_source` yields documents one at a time and holds no more than one, so a source may be larger than memory. What cannot be
read as text is never dropped silently: it is reported by name, or the source raises an error.

Left out on purpose: the web. A page is text only after its menus and scripts are gone, and tools for that exist (trafilatura).
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.course.typed import PathText
from shared.corpus import EMBEDDED, CorpusError, Document, read_package, verified
from shared.data import hub, tables

Kind = Literal["auto", "embedded", "text", "jsonl", "csv", "parquet", "saved", "hub"]
Skip = Callable[[str, str], None]  # called with the name of what is skipped, and why

KIND_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
TABLES = {"jsonl": tables.read_jsonl, "csv": tables.read_csv, "parquet": tables.read_parquet}
PART = 2**20  # bytes; a text file larger than this is read as several documents, cut at ends of lines


@dataclass(frozen=True)
class Source:
    """One source of text.

    Args:
        path: a file, a folder, the name of a dataset on the Hugging Face hub, or "embedded" for the course's own corpus.
        kind: what it is; auto goes by the path: a name that is no path here is a hub dataset.
        text_field: the field, or column, that holds the text of a record.
        suffixes: of the files to read in a folder, such as [".py", ".md"]; empty for every file.
        split: which split of a hub or saved dataset.
        config: the configuration of a hub dataset that has several.
        revision: the version of a hub dataset, by tag or commit.
        streaming: read a hub dataset as it arrives, rather than download it first.
        limit: at most this many documents; null for all.
        weight: share of the training tokens, any positive number beside the other sources' (7 and 3 are 70 and 30 %); a source that has
            been gone through begins again. null for every source: all text in the proportions that it comes in.
    """

    path: PathText = "embedded"
    kind: Kind = "auto"
    text_field: str = "text"
    suffixes: tuple[str, ...] = ()
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = True
    limit: int | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}: give at least 1 document, or null for all.")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}: give a positive number, or leave the source out.")

    def resolved_kind(self) -> str:
        """What `auto` stands for.

        Raises:
            CorpusError: the path looks like a file's, and there is none.
        """
        if self.kind != "auto":
            return self.kind
        path = Path(self.path).expanduser()
        if self.path == "embedded":
            return "embedded"
        if path.is_dir():
            return "saved" if hub.is_saved(path) else "text"
        if path.exists():
            return kind_of_file(path)
        if path.is_absolute() or self.path.startswith((".", "~")) or path.suffix or self.path.count("/") > 1:
            raise CorpusError(f"{self.path} does not exist: give an existing file or folder, or the name of a hub dataset.")
        return "hub"


def open_source(source: Source, skip: Skip | None = None) -> Iterator[Document]:
    """The documents of a source, in an order that does not change.

    A document's name says where it came from, relative to the source: a path, or a file and the number of a record.

    Args:
        skip: called with (name, reason) for everything that is no text: not UTF-8, empty, binary, a record that cannot be
            read. None to refuse the source instead.

    Raises:
        CorpusError: there is no such source, it lacks the field or split that was asked for, or, without `skip`, something in
            it is no text.
    """
    skip = skip or refuse
    given = 0
    for name, content in read(source, skip):
        if reason := reason_against(content):
            skip(name, reason)
        else:
            given += 1
            yield Document(name, content)
            if given == source.limit:
                return


def refuse(name: str, reason: str) -> None:
    raise CorpusError(f"{name} {reason}.")


def reason_against(content: bytes) -> str | None:
    """Why these bytes are no text, if they are not."""
    if not content.strip():
        return "is empty"
    if b"\0" in content:
        return "is a binary file (it holds zero bytes)"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x})"
    return None


def read(source: Source, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of everything in the source, text or not."""
    kind = source.resolved_kind()
    path = Path(source.path).expanduser()
    if kind == "embedded":
        for package in EMBEDDED:
            yield from ((document.name, document.content) for document in verified(package, read_package(package)))
    elif kind in ("saved", "hub"):
        yield from hub.read_dataset(source, skip)
    elif not path.exists():
        raise CorpusError(f"{source.path} does not exist: give an existing file or folder.")
    elif path.is_dir():
        for file in files_of(path, source.suffixes):
            of_file = kind_of_file(file) if source.kind == "auto" else kind
            yield from read_path(file, str(file.relative_to(path)), of_file, source.text_field, skip)
    else:
        yield from read_path(path, path.name, kind, source.text_field, skip)


def kind_of_file(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return KIND_OF_SUFFIX.get(suffixes[-1].lower() if suffixes else "", "text")


def files_of(folder: Path, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """The files of a folder and its subfolders, sorted; hidden ones are left out.

    Raises:
        CorpusError: there are none.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    kept = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    kept = [path for path in kept if not suffixes or path.suffix in suffixes]
    if not found:
        raise CorpusError(f"{folder} holds no file: put text files into it, or give another folder.")
    if not kept:
        there = sorted({path.suffix or "(none)" for path in found})
        raise CorpusError(f"{folder} holds no file{f' ending in {list(suffixes)}' if suffixes else ''}; endings there: {there}.")
    return kept


def read_path(path: Path, name: str, kind: str, text_field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """The documents of one file.

    Raises:
        CorpusError: among others, a compressed or columnar file that turns out to be damaged further in.
    """
    try:
        if kind == "text":
            yield from read_text(path, name)
        else:
            yield from TABLES[kind](path, name, text_field, skip)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{name} cannot be read to its end ({error}): the file is damaged or not what its name says.") from error


def read_text(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """A text file as one document, or, if it is large, as parts of about PART bytes that end where a line ends."""
    with tables.open_bytes(path) as file:
        part, number = file.read(PART), 0
        while part:
            rest = file.readline(PART) if len(part) == PART else b""
            following = file.read(PART)
            yield (f"{name}#{number}" if number or following else name), part + rest
            part, number = following, number + 1
        if not number:
            yield name, b""


def identity(source: Source, digest: Callable[[Path], str]) -> dict[str, Any]:
    """What must be equal for a source to hold the same text: its settings but for its weight, and the content of its files.

    A hub dataset is known by name, split and revision alone.

    Args:
        digest: the hash of a file's content (`shared.data.digests`).
    """
    settings = {name: value for name, value in vars(source).items() if name != "weight"}
    known: dict[str, Any] = {"settings": json.loads(json.dumps(settings)), "kind": source.resolved_kind()}
    path = Path(source.path).expanduser()
    if known["kind"] == "embedded":
        known["packages"] = [package.sha256 for package in EMBEDDED]
    elif known["kind"] != "hub":
        if not path.exists():
            raise CorpusError(f"{source.path} does not exist: give an existing file or folder.")
        files = files_of(path, source.suffixes if known["kind"] != "saved" else ()) if path.is_dir() else [path]
        known["files"] = [(str(file), digest(file)) for file in files]
    return known
