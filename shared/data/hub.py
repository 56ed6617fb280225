"""Chapter 03. Datasets of the Hugging Face hub, by name, and datasets that were saved to a folder.

The `datasets` library does the work: it knows every format of the hub, keeps what it downloaded, and can stream. A folder that
it wrote with `save_to_disk` opens the same way, without a network.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.corpus import CorpusError
from shared.data import tables

if TYPE_CHECKING:
    from shared.data.sources import Skip, Source


def is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def read_dataset(source: "Source", skip: "Skip") -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each record's text, in the dataset's order.

    Raises:
        CorpusError: the dataset cannot be reached, or has no such split, configuration or field.
    """
    opened = open_saved(source) if source.resolved_kind() == "saved" else open_hub(source)
    name = Path(source.path).name
    fields = opened.column_names
    if fields is None:  # a stream whose fields only its first record tells
        records = iter(opened)
        first = next(records, None)
        fields = list(first) if first else []
        opened = itertools.chain([first], records) if first else []
    tables.require_field(source.text_field, fields, source.path)
    for number, record in enumerate(opened, 1):
        yield from tables.text_of(record, source.text_field, f"{name}:{number}", skip)


def open_saved(source: "Source") -> Any:
    """The dataset of a folder, mapped from its files."""
    from datasets import DatasetDict, load_from_disk

    try:
        opened = load_from_disk(str(Path(source.path).expanduser()))
    except (OSError, ValueError, KeyError) as error:
        raise CorpusError(f"{source.path} is not a whole dataset folder ({error}): save it again.") from None
    if not isinstance(opened, DatasetDict):
        return opened
    if source.split not in opened:
        raise CorpusError(f"{source.path} has no split {source.split!r}: it has {', '.join(map(repr, opened))}.")
    return opened[source.split]


def open_hub(source: "Source") -> Any:
    """The dataset of the hub: a stream, or downloaded and mapped."""
    from datasets import load_dataset

    try:
        return load_dataset(source.path, source.config, split=source.split, revision=source.revision, streaming=source.streaming)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset, split or configuration
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        cure = "Check the spelling, or the network."
        if source.kind == "auto":
            cure = f"There is no file or folder {source.path} here either: check the spelling, or the network."
        what = f"The hub dataset {source.path!r} (split {source.split!r})"
        raise CorpusError(f"{what} cannot be opened: {reason.rstrip('.')}. {cure}") from None
