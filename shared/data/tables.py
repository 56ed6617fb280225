"""Chapter 03. JSONL, CSV and Parquet files as text: records streamed one at a time.

Each reader yields (name, bytes) for the text of each record, where the name is the file's and the record's number, from 1.
A field that is not there is an error of the whole file and says which fields are; a record that cannot be read is skipped by name.
"""

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shared.corpus import CorpusError

Skip = Callable[[str, str], None]
ROWS = 256  # of a Parquet file, read at a time


def open_bytes(path: Path) -> BinaryIO:
    """A file for reading, unpacked if it ends in .gz."""
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror}).") from None


def read_jsonl(path: Path, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """One JSON object a line; a file with one JSON list of objects is read as well."""
    with open_bytes(path) as file:
        if path.name.removesuffix(".gz").endswith(".json"):
            yield from read_json(file.read(), name, field, skip)
            return
        for number, line in enumerate(file, 1):
            place = f"{name}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                skip(place, "is not JSON" if is_utf8(line) else "is not UTF-8")
                continue
            yield from text_of(record, field, place, skip)


def read_json(content: bytes, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """A whole .json file: a list of objects, one object, or objects a line."""
    try:
        records = json.loads(content)
    except ValueError:  # objects a line under the name .json
        lines = [line for line in content.splitlines() if line.strip()]
        try:
            records = [json.loads(line) for line in lines]
        except ValueError:
            skip(name, "is not JSON")
            return
    for number, record in enumerate(records if isinstance(records, list) else [records], 1):
        yield from text_of(record, field, f"{name}:{number}", skip)


def read_csv(path: Path, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """A table with a header line, separated by commas, or by tabs if the file is a .tsv."""
    csv.field_size_limit(sys.maxsize)
    separator = "\t" if ".tsv" in path.suffixes else ","
    with open_bytes(path) as file:
        # Bytes that are not UTF-8 stay in the text as lone surrogates and come out again in `encoded`.
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.DictReader(lines, delimiter=separator)
        require_field(field, rows.fieldnames or [], name)
        try:
            for number, record in enumerate(rows, 1):
                yield from text_of(record, field, f"{name}:{number}", skip)
        except csv.Error as error:
            raise CorpusError(f"{name}, line {rows.line_num}, cannot be read as a table: {error}.") from None


def read_parquet(path: Path, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """A Parquet file, of which one column is read, ROWS rows at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise CorpusError(f"{name} is not a whole Parquet file ({str(error).splitlines()[0]}).") from None
    with file:
        require_field(field, file.schema_arrow.names, name)
        number = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
            for value in batch.column(0).cast(binary_of(batch.column(0).type)).to_pylist():
                number += 1
                yield from text_of({field: value}, field, f"{name}:{number}", skip)


def binary_of(kind: Any) -> Any:
    """The type to read a column in: text as its bytes, which need not be UTF-8, and anything else as it is."""
    import pyarrow

    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return pyarrow.large_binary()
    return kind


def require_field(field: str, there: Iterable[str], name: str) -> None:
    if field not in there:
        raise CorpusError(
            f"{name} has no field {field!r}: it has {', '.join(map(repr, there)) or 'none'}. Say in "
            f"prepare.sources which one holds the text: '[{{path: PATH, text_field: {next(iter(there), 'NAME')}}}]'."
        )


def text_of(record: Any, field: str, place: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """The text of one record.

    Raises:
        CorpusError: the record has no such field, or something else than text in it.
    """
    if not isinstance(record, dict):
        skip(place, "is no record with fields")
        return
    require_field(field, record, place)
    value = record[field]
    if value is None:
        skip(place, "is empty")
    elif isinstance(value, str):
        yield place, value.encode("utf-8", "surrogateescape") if is_utf8(value) else value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        yield place, value
    else:
        raise CorpusError(f"{place}: field {field!r} holds {type(value).__name__}, not text. Give another text_field.")


def is_utf8(value: str | bytes) -> bool:
    try:
        value.decode("utf-8") if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    except UnicodeError:
        return False
    return True
