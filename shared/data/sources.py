"""Chapter 03. Data sources (files, folders, tables, datasets of the Hugging Face hub), streamed one document at a time, and their hashes.

`open_source` yields documents one at a time and holds no more than one, so a source may be larger than memory. What cannot be
read as text is never dropped silently: it is reported by name, or the source raises an error.

Prepared text is keyed by the content of its sources (`identity`), so `Digests` keeps the SHA-256 of files between runs.

Left out on purpose: the web. A page is text only after its menus and scripts are gone, and tools for that exist (trafilatura).
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from shared.corpus import EMBEDDED, IRREGULAR, CorpusError, Document, existing, find, read_package, verified
from shared.course.errors import CourseError
from shared.data import hub, tables
from shared.data.source import WILDCARD, Skip, Source, kind_of_file
from shared.output_files import write_atomically

TABLES = {"jsonl": tables.read_jsonl, "csv": tables.read_csv, "parquet": tables.read_parquet}
PART = 2**20  # bytes; a text file larger than this is read as several documents, cut at ends of lines


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
    if kind == "embedded":
        for package in EMBEDDED:
            yield from ((document.name, document.content) for document in verified(package, read_package(package)))
    elif kind in ("saved", "hub"):
        yield from hub.read_dataset(source, skip)
    else:
        path, files = files_at(source, skip)
        for file in files:
            of_file = kind_of_file(file) if source.kind == "auto" else kind
            name = str(file.relative_to(path)) if file is not path else path.name
            # A name that is not UTF-8 can be neither stored nor hashed: its other bytes are spelt out.
            yield from read_path(file, os.fsencode(name).decode("utf-8", "backslashreplace"), of_file, source.text_field, skip)


def files_at(source: Source, skip: Skip | None = None, suffixes: tuple[str, ...] | None = None) -> tuple[Path, list[Path]]:
    """The files of a source, and the folder that their names are relative to; of a single file, itself. Of a pattern (glob), the regular
    files that match and are not hidden, sorted.

    Args:
        suffixes: in place of the source's.
    """
    suffixes = source.suffixes if suffixes is None else suffixes
    path, mode = find(source.path)
    if mode or not WILDCARD.search(source.path):
        path = existing(source.path)
        return path, files_of(path, suffixes, skip) if path.is_dir() else [path]
    folder = Path(*takewhile(lambda part: not WILDCARD.search(part), path.parts))
    pattern = str(path.relative_to(folder))
    matching = [file for file in folder.glob(pattern) if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    files = sorted(file for file in matching if file.is_file() and (not suffixes or file.suffix in suffixes))
    if not files:
        raise CorpusError(f"No file matches {source.path}{f' and ends in {list(suffixes)}' if suffixes else ''}: give another pattern.")
    return folder, files


def files_of(folder: Path, suffixes: tuple[str, ...] = (), skip: Skip | None = None) -> list[Path]:
    """The regular files of a folder and its subfolders, sorted; hidden ones are left out, and links to folders are not followed.

    Args:
        skip: called for each link to a folder, and for everything else that is neither a file nor a folder.
    """
    found: list[Path] = []

    def refuse_closed(error: OSError) -> None:
        cure = "make it readable, or give another folder"
        raise CorpusError(f"The folder {error.filename} cannot be read ({error.strerror}): {cure}.") from None

    for place, folders, names in os.walk(folder, onerror=refuse_closed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [Path(place, name) for name in (*names, *links) if not name.startswith(".")]
    kept = sorted(path for path in found if not suffixes or path.suffix in suffixes)
    irregular = {path for path in kept if not path.is_file()}
    for path in sorted(irregular):
        if skip is not None:
            skip(str(path.relative_to(folder)), "is a link to a folder, and not followed" if path.is_dir() else IRREGULAR)
    kept = [path for path in kept if path not in irregular]
    if not found:
        raise CorpusError(f"{folder} holds no file: put text files into it, or give another folder.")
    if not kept:
        there = sorted({path.suffix or "(none)" for path in found})
        raise CorpusError(f"{folder} holds no file{f' ending in {list(suffixes)}' if suffixes else ''}; endings there: {there}.")
    return kept


def read_path(path: Path, name: str, kind: str, text_field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """The documents of one file."""
    try:
        if not path.stat().st_size:  # also what the kernel makes up as it is read, and may have no end
            yield name, b""
        elif kind == "text":
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
            part += file.readline(PART)
            following = file.read(PART)
            # A line longer than that is cut between characters: a continuation byte belongs to the one before it.
            whole = next((place for place, byte in enumerate(following[:3]) if byte & 0xC0 != 0x80), 3)
            yield (f"{name}#{number}" if number or following else name), part + following[:whole]
            following = following[whole:]
            part, number = following, number + 1
        if not number:
            yield name, b""


def identity(source: Source, digest: Callable[[Path], str]) -> dict[str, Any]:
    """What must be equal for a source to hold the same text: its settings but for its weight, and the content of its files.

    A hub dataset is known by name, split and revision alone.

    Args:
        digest: the hash of a file's content (`shared.data.sources`).
    """
    settings = {name: value for name, value in vars(source).items() if name != "weight"}
    known: dict[str, Any] = {"settings": json.loads(json.dumps(settings)), "kind": source.resolved_kind()}
    if known["kind"] == "embedded":
        known["packages"] = [package.sha256 for package in EMBEDDED]
    elif known["kind"] != "hub":
        _, files = files_at(source, suffixes=source.suffixes if known["kind"] != "saved" else ())
        try:
            # What has no size is not opened, here as in `read_path`.
            known["files"] = [(str(file), digest(file) if file.stat().st_size else None) for file in files]
        except OSError as error:
            raise CorpusError(f"{error.filename} cannot be read ({error.strerror}): make it readable, or leave it out.") from None
    return known


SETTLED = 10.0  # seconds; file servers' clocks may be off by a few


class Digests:
    """Content hashes of files.

    Args:
        path: where they are kept, as JSON; made by `save`. A file that cannot be read is begun again.
    """

    def __init__(self, path: Path):
        self.path, self.changed = path, False
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            kept = {}
        self.kept: dict[str, list] = kept if isinstance(kept, dict) else {}

    def of(self, file: Path) -> str:
        """The SHA-256 of a file's content, read only where it may have changed.

        Raises:
            OSError: it cannot be read.
        """
        now, found = time.time(), file.stat()
        key = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        kept = self.kept.get(str(file.absolute()))
        if isinstance(kept, list) and len(kept) == 2 and kept[0] == key:
            return kept[1]
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if now - found.st_ctime > SETTLED:
            self.kept[str(file.absolute())], self.changed = [key, digest], True
        return digest

    def save(self) -> None:
        """Keep the hashes, where the folder can be written to: in one that can only be read they are computed at each start."""
        if self.changed:
            with suppress(CourseError):
                write_atomically(self.path, json.dumps(self.kept).encode())
