"""Chapter 01. The text corpus to train on: the embedded one, or the reader's own files, as bytes.

The embedded corpus is Python source that was installed with the course: the wheels below are pure Python and pinned to an
exact version, so their files are the same bytes on every machine. Nothing is downloaded and nothing is shipped. Documents
are joined with a zero byte after each, which no source file contains, so a model can learn where a file ends.
"""

import hashlib
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from shared.course.errors import CourseError

HELD_OUT_SHARE = 0.05
IRREGULAR = "is not a regular file"  # but a FIFO, a device, a socket, or a link to nothing
NOT_COURSE_TEXT = {"tests", "testing", "benchmarks"}  # folders that a reader would not call good prose or code


@dataclass(frozen=True)
class Package:
    """A wheel of the embedded corpus, with the totals of its kept files."""

    name: str
    version: str
    files: int
    bytes: int
    sha256: str  # over the sorted files: path, zero byte, content, zero byte


EMBEDDED = (
    Package("sympy", "1.14.0", 818, 16_026_249, "344625a855f4c23ea8f67600ec95ea3f0e37a20fe10ca83ad6218976c6c4664c"),
    Package("networkx", "3.6.1", 288, 4_001_532, "5227f1117229e44418f558e8581000bcfde910f016b0f7f52f06115e5a17a20a"),
    Package("mpmath", "1.3.0", 51, 1_497_037, "596475ba4b265e8627a9f57f20605300131f6d889f6a726124aa53bdbfe241ee"),
    Package("jinja2", "3.1.6", 25, 490_066, "e9f5178e345c59a38822a349b8a573088d9843903ed1ba03f0a0814312acb78c"),
)


class CorpusError(CourseError):
    """A text source that cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Document:
    """One file: where it came from, and its bytes. source: which of several sources it is from, counted from 0."""

    name: str
    content: bytes
    source: int = 0


@dataclass(frozen=True)
class Corpus:
    """Documents split by name into training and held-out ones."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def training_bytes(self) -> Tensor:
        """[bytes] uint8: the training documents, each followed by a zero byte."""
        return join(self.training)

    def held_out_bytes(self) -> Tensor:
        """[bytes] uint8: the held-out documents, each followed by a zero byte."""
        return join(self.held_out)


def embedded_corpus(packages: Sequence[Package] = EMBEDDED) -> Corpus:
    """The Python source of the pinned packages, checked against the recorded checksums.

    Raises:
        CorpusError: a package is missing, has another version, or a file of it was changed.
    """
    return split([document for package in packages for document in verified(package, read_package(package))])


def read_package(package: Package) -> list[Document]:
    """The package's kept files, sorted by path, as the wheel's own record lists them."""
    try:
        distribution = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        raise CorpusError(f"The embedded corpus needs {package.name} {package.version}: run `make install`.") from None
    if distribution.version != package.version:
        raise CorpusError(
            f"The embedded corpus needs {package.name} {package.version}, found {distribution.version}: run `make install`."
        )
    kept = [file for file in distribution.files if file.suffix == ".py" and not NOT_COURSE_TEXT.intersection(file.parts)]
    return [Document(str(file), file.locate().read_bytes()) for file in sorted(kept, key=str)]


def verified(package: Package, documents: list[Document]) -> list[Document]:
    found = summed(package.name, package.version, documents)
    if found != package:
        changed = changed_files(package) or "no file that its wheel lists"
        raise CorpusError(
            f"The files of {package.name} {package.version} are not those of its wheel ({found.files} files, {found.bytes} "
            f"bytes; expected {package.files}, {package.bytes}). Changed: {changed}. Reinstall it: "
            f"`pip install --force-reinstall --no-deps {package.name}=={package.version}`."
        )
    return documents


def summed(name: str, version: str, documents: Iterable[Document]) -> Package:
    """A package's record in `EMBEDDED`, computed from its documents."""
    documents = list(documents)
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.name.encode() + b"\0" + document.content + b"\0")
    return Package(name, version, len(documents), sum(len(d.content) for d in documents), digest.hexdigest())


def changed_files(package: Package) -> str:
    """The installed files of a package that differ from the hashes in the wheel's record."""
    import base64

    changed = []
    for file in metadata.distribution(package.name).files:
        if file.hash and file.suffix == ".py":
            path = Path(file.locate())
            digest = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b""
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
                changed.append(str(file))
    return ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def split(documents: Sequence[Document], held_out_share: float = HELD_OUT_SHARE) -> Corpus:
    """Hold out about `held_out_share` of the documents, chosen by the hash of their names.

    A document's side depends on its name alone, so adding a file never moves another across.
    """
    limit = int(held_out_share * 2**32)
    held_out = [d for d in documents if int.from_bytes(hashlib.sha256(d.name.encode(errors="surrogateescape")).digest()[:4]) < limit]
    names = {document.name for document in held_out}
    return Corpus(tuple(d for d in documents if d.name not in names), tuple(held_out))


def find(text: str) -> tuple[Path, int]:
    """The path that a text names, and its mode; 0 where nothing is."""
    try:
        path = Path(text).expanduser()
        return path, path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path, 0
    except (OSError, RuntimeError) as error:  # RuntimeError: an unknown user after ~
        shown = text if len(text) <= 100 else f"{text[:100]}..."
        reason = str(getattr(error, "strerror", error)).rstrip(".")
        raise CorpusError(f"{shown} cannot be opened ({reason}): give another file or folder.") from None


def existing(text: str) -> Path:
    """The file or folder that a text names."""
    path, mode = find(text)
    if not mode:
        raise CorpusError(f"{text} does not exist: give an existing file or folder.")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise CorpusError(f"{text} {IRREGULAR}: give a file that holds text, or a folder of such files.")
    return path


def read_files(paths: Sequence[Path]) -> Corpus:
    """A user's own text: files, or folders whose text files are all read. The held-out part of a single file is its end.

    Raises:
        CorpusError: a path is missing or cannot be read, a named file is empty or holds zero bytes, or there is no text at all.
    """
    documents = []
    for path in paths:
        path = existing(str(path))
        if path.is_dir():
            documents += [d for d in map(read_file, sorted(path.rglob("*"))) if d and not reason_against(d)]
        else:
            document = read_file(path)
            if reason := reason_against(document):
                raise CorpusError(f"{path} {reason}.")
            documents.append(document)
    if not documents:
        raise CorpusError(f"There is no text in {', '.join(map(str, paths))}: every file is empty or binary.")
    corpus = split(documents)
    return corpus if corpus.training and corpus.held_out else split_by_end(documents)


def read_file(path: Path) -> Document | None:
    """Read a regular file. One of size 0 is not opened, because a file that the kernel generates may have no end."""
    if not path.is_file():
        return None
    try:
        return Document(str(path), path.read_bytes() if path.stat().st_size else b"")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror}): make it readable, or give other text.") from None


def reason_against(document: Document) -> str | None:
    """Why a document cannot be trained on, if it cannot."""
    if not document.content:
        return "is empty: give a file that holds text"
    if b"\0" in document.content:
        return "is a binary file (it holds zero bytes): give a text file"
    return None


def split_by_end(documents: Sequence[Document], held_out_share: float = HELD_OUT_SHARE) -> Corpus:
    """For too few documents to hold one out: the last part of each is held out."""
    training, held_out = [], []
    for document in documents:
        cut = round(len(document.content) * (1 - held_out_share))
        training.append(Document(document.name, document.content[:cut]))
        held_out.append(Document(document.name, document.content[cut:]))
    return Corpus(tuple(training), tuple(held_out))


def join(documents: Iterable[Document]) -> Tensor:
    """[bytes] uint8: the documents, each followed by a zero byte."""
    joined = bytearray(b"".join(document.content + b"\0" for document in documents))
    return torch.frombuffer(joined, dtype=torch.uint8)
