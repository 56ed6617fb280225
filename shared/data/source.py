"""Chapter 03. A data source as it is configured: its path, its kind, and which of its records count. `shared.data.sources` reads it."""

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.corpus import CorpusError, find
from shared.course.bounds import PositiveFloat, PositiveInt, checked
from shared.course.typed import PathText

Kind = Literal["auto", "embedded", "text", "jsonl", "csv", "parquet", "saved", "hub"]
Skip = Callable[[str, str], None]  # called with the name of what is skipped, and why
KIND_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
@checked
class Source:
    """One source of text.

    Args:
        path: a file, a folder, a pattern of files such as docs/**/*.md, the name of a dataset on the Hugging Face hub, or "embedded" for
            the course's own corpus.
        kind: what it is; auto goes by the path: a name that is no path here is a hub dataset.
        text_field: the field, or column, that holds the text of a record.
        suffixes: of the files to read in a folder, such as [".py", ".md"]; empty for every file.
        split: which split of a hub or saved dataset.
        config: the configuration of a hub dataset that has several.
        revision: the version of a hub dataset, by tag or commit.
        streaming: read a hub dataset as it arrives, rather than download it first.
        limit: at most this many documents; null for all.
        weight: share of the training tokens, any positive number beside the other sources' (7 and 3 are 70 and 30 %); an exhausted
            source begins again. null for every source: all text in the proportions that it comes in.
    """

    path: PathText = "embedded"
    kind: Kind = "auto"
    text_field: str = "text"
    suffixes: tuple[str, ...] = ()
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = True
    limit: PositiveInt | None = None
    weight: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if not self.path.strip() or "\0" in self.path:
            raise ValueError(f"prepare.sources has the path {self.path!r}: give a file, a folder, a pattern, a hub dataset, or embedded.")

    def resolved_kind(self) -> str:
        """What `auto` stands for."""
        if self.kind != "auto":
            return self.kind
        if self.path == "embedded":
            return "embedded"
        path, mode = find(self.path)
        if stat.S_ISDIR(mode):
            return "saved" if is_saved(path) else "text"
        if mode:
            return kind_of_file(path)
        if WILDCARD.search(self.path):
            return "text"
        if path.is_absolute() or self.path.startswith((".", "~")) or path.suffix or self.path.count("/") > 1:
            raise CorpusError(f"{self.path} does not exist: give an existing file or folder, or the name of a hub dataset.")
        return "hub"


def kind_of_file(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return KIND_OF_SUFFIX.get(suffixes[-1].lower() if suffixes else "", "text")


def is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()
