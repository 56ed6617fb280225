"""Chapter 03. Datasets of the Hugging Face hub, by name, and datasets that were saved to a folder.

The `datasets` library does the work: it knows every format of the hub, keeps what it downloaded, and can stream. A folder that
it wrote with `save_to_disk` opens the same way, without a network.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from shared.corpus import CorpusError
from shared.data import tables
from shared.data.source import Skip, Source
from shared.data.tables import first_line

# By these names `load_dataset` reads all files below the current folder; no dataset of the hub has one of them.
FORMATS = {
    "arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor", "hdf5", "iceberg", "imagefolder", "json",
    "lance", "meshfolder", "mmcif", "niftifolder", "pandas", "parquet", "pdb", "pdffolder", "text", "tsfile", "videofolder", "vortex",
    "webdataset", "xml",
}  # fmt: skip
SECONDS = 2  # to wait for the hub's first answer


def read_dataset(source: Source, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each record's text, in the dataset's order."""
    name = Path(source.path).name
    if source.resolved_kind() == "saved":
        yield from read_saved(source, name, skip)
        return
    opened = open_hub(source)
    records = unbroken(opened, source)
    fields = opened.column_names
    if fields is None:  # a stream whose fields only its first record tells
        first = next(records, None)
        fields = list(first) if first else []
        records = itertools.chain([first], records) if first else records
    tables.require_field(source.text_field, fields, source.path)
    places = ((f"{name}:{number}", record) for number, record in enumerate(records, 1))
    yield from tables.texts_of(places, source.text_field, skip)


def read_saved(source: Source, name: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """The text of a dataset that was saved to a folder. Its files are memory, and are checked before a value is taken from them."""
    import pyarrow

    opened = open_saved(source)
    tables.require_field(source.text_field, opened.column_names, source.path)
    columns = (
        piece
        for table in opened.select_columns([source.text_field]).with_format("arrow").iter(tables.ROWS)
        for piece in table.column(0).chunks
    )
    try:
        yield from tables.texts_of(tables.column_records(columns, source.text_field, name), source.text_field, skip)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{source.path} is damaged ({first_line(error)}): save it again.") from None


def unbroken(records: Any, source: Source) -> Iterator[Any]:
    """The records of a hub dataset."""
    records, given = iter(records), 0
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except Exception as error:  # raised by any of the libraries that stream it
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise CorpusError(
                f"The hub dataset {source.path!r} broke off after record {given:,} ({reason}). Start again when the network is back, or "
                "download it first (streaming: false in prepare.sources)."
            ) from error
        given += getattr(record, "num_rows", 1)  # of an Arrow table, several
        yield record


def open_saved(source: Source) -> Any:
    """The dataset of a folder, mapped from its files."""
    from datasets import DatasetDict, load_from_disk

    try:
        opened = load_from_disk(str(Path(source.path).expanduser()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the library does not check what its JSON files say
        raise CorpusError(f"{source.path} is not a whole dataset folder ({first_line(error)}): save it again.") from None
    if not isinstance(opened, DatasetDict):
        return opened
    if source.split not in opened:
        raise CorpusError(f"{source.path} has no split {source.split!r}: it has {', '.join(map(repr, opened))}.")
    return opened[source.split]


def open_hub(source: Source) -> Any:
    """The dataset of the hub: a stream, or downloaded and mapped."""
    if source.path in FORMATS:
        raise CorpusError(f"There is no file or folder {source.path} in {Path.cwd()}: check the spelling, or give its whole path.")
    # Asked once, for SECONDS at most: `load_dataset` would ask six times, for half a minute, before it looks at what was downloaded.
    answers = None if Path(source.path).exists() else ask(source)
    import datasets  # while the question is under way

    cure = "Check the spelling, or the network."
    if source.kind == "auto":
        cure = f"There is no file or folder {source.path} in {Path.cwd()} either: check the spelling, or the network."
    what = f"The hub dataset {source.path!r} (split {source.split!r})"
    unreached = answers and reason_unreached(*answers)
    online = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = online or unreached is not None
    try:
        return datasets.load_dataset(
            source.path, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        )
    except (OSError, ValueError, RuntimeError) as error:  # no such dataset, split or configuration, or none that was downloaded
        reason = unreached or first_line(error)
        raise CorpusError(f"{what} cannot be opened: {reason.rstrip('.')}. {cure}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = online


def ask(source: Source) -> tuple[SimpleQueue, float]:
    """Ask the hub for a dataset, in a thread. Returns the queue where its answer will be, and when it was asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    answers: SimpleQueue = SimpleQueue()

    def work() -> None:
        try:
            HfApi().dataset_info(source.path, revision=source.revision, timeout=SECONDS)
            answers.put(None)
        except (HfHubHTTPError, ValueError):  # an answer, or a name that none can have
            answers.put(None)
        except Exception as error:  # of the library's transport, whose errors have no common name over its versions
            answers.put(f"the hub cannot be reached ({first_line(error)})")

    # The library's own limit holds for each of its requests, and it makes others first.
    Thread(target=work, daemon=True).start()
    return answers, time.monotonic()


def reason_unreached(answers: SimpleQueue, asked: float) -> str | None:
    """Why the hub gave no answer within SECONDS, if it gave none; an answer that it has no such dataset is one."""
    try:
        return answers.get(timeout=max(1.0, asked + SECONDS - time.monotonic()))  # on a busy machine the import took the time
    except Empty:
        return f"the hub cannot be reached (no answer in {SECONDS} seconds)"
