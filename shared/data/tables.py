"""Chapter 03. JSONL, CSV and Parquet files as text: records streamed one at a time.

Each reader yields (name, bytes) for the text of each record, where the name is the file's and the record's number, from 1.
A field that no record has is an error of the whole file and says which fields are there; one record that cannot be read is skipped by name.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shared.corpus import CorpusError
from shared.data.arrow import change_of

Skip = Callable[[str, str], None]
Record = tuple[str, Any]  # its place, such as "a.jsonl:3", and its fields
ROWS = 256  # of a Parquet file, read at a time
LONGEST = 2**28  # bytes of a line, or of a .json file: a compressed line can be larger than memory
WRONG = 1000  # records in which a source has no text before its field is taken for wrong


class FieldError(CorpusError):
    """A record without text in the field; `reason` says so in few words."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def first_line(error: Exception) -> str:
    """The beginning of what a library says; some say nothing, and some a page."""
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def open_bytes(path: Path) -> BinaryIO:
    """A file for reading, unpacked if it ends in .gz."""
    try:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror}).") from None


def read_jsonl(path: Path, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """One JSON object a line; a file with one JSON list of objects is read as well."""
    yield from texts_of(records_of_json(path, name, skip), field, skip)


def records_of_json(path: Path, name: str, skip: Skip) -> Iterator[Record]:
    """The values of a JSONL file, or of one JSON list."""
    with open_bytes(path) as file:
        yield from json_records(file, name, skip) if path.name.removesuffix(".gz").endswith(".json") else json_lines(file, name, skip)


def json_lines(file: BinaryIO, name: str, skip: Skip) -> Iterator[Record]:
    """The value of each line that is JSON."""
    for number, line in enumerate(lines_of(file), 1):
        place = f"{name}:{number}"
        if len(line) > LONGEST:
            skip(place, f"is longer than {LONGEST:,} bytes")
        elif line.strip():
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                skip(place, reason_not_json(line, error))


def json_records(file: BinaryIO, name: str, skip: Skip) -> Iterator[Record]:
    """The values of a whole .json file: of a list, one object, or objects a line."""
    content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise CorpusError(f"{name} is larger than {LONGEST:,} bytes, and is read as a whole: save it as .jsonl, one object a line.")
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:
        lines = io.BytesIO(content.strip())
        try:
            json.loads(lines.readline())
        except (ValueError, RecursionError):
            skip(name, reason_not_json(content, error))
        else:  # objects a line under the name .json
            lines.seek(0)
            yield from json_lines(lines, name, skip)
        return
    for number, record in enumerate(records if isinstance(records, list) else [records], 1):
        yield f"{name}:{number}", record


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is longer than LONGEST, the first LONGEST + 1 bytes."""
    while line := file.readline(LONGEST + 1):
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST + 1)
        yield line


def reason_not_json(content: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deep"
    return "is not JSON" if is_utf8(content) else "is not UTF-8"


def read_csv(path: Path, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """A table with a header line, separated by commas, or by tabs if the file is a .tsv."""
    yield from texts_of(records_of_csv(path, name, lambda fields: require_field(field, fields, name)), field, skip)


def records_of_csv(path: Path, name: str, require: Callable[[list[str]], None]) -> Iterator[Record]:
    """The rows of a table as records. require: called with the names of the fields before the first row."""
    csv.field_size_limit(LONGEST)
    separator = "\t" if ".tsv" in path.suffixes else ","
    with open_bytes(path) as file:
        # Bytes that are not UTF-8 stay in the text as lone surrogates and come out again in `encoded`.
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.DictReader(iter(lambda: lines.readline(LONGEST), ""), delimiter=separator)
        try:
            require(list(rows.fieldnames or []))
            yield from ((f"{name}:{number}", record) for number, record in enumerate(rows, 1))
        except csv.Error as error:
            raise CorpusError(f"{name}, line {rows.line_num}, cannot be read as a table: {error}.") from None


def read_parquet(path: Path, name: str, field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """A Parquet file, of which one column is read, ROWS rows at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            require_field(field, file.schema_arrow.names, name)
            batches = (batch.column(0) for batch in file.iter_batches(batch_size=ROWS, columns=[field]))
            yield from texts_of(column_records(batches, field, name), field, skip)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{name} is not a whole Parquet file ({first_line(error)}): make it again, or leave it out.") from None


def column_records(columns: Iterable[Any], field: str, name: str) -> Iterator[Record]:
    """The values of a column as records of one field; the column comes in pieces, as Arrow arrays.

    Raises:
        pyarrow.ArrowException: the arrays are damaged.
    """
    number = 0
    for column in columns:
        column.validate()
        column = column.cast(binary_of(column.type))
        column.validate(full=True)  # a damaged file can hold offsets that lead out of its memory
        change = change_of(column.type) or (lambda value: value)
        for value in column.to_pylist():
            number += 1
            yield f"{name}:{number}", {field: change(value)}


def binary_of(kind: Any) -> Any:
    """The type to read a column in: text as its bytes, which need not be UTF-8, and anything else as it is."""
    import pyarrow

    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return pyarrow.large_binary()
    return kind


def require_field(field: str, there: Iterable[str], name: str) -> None:
    if field not in there:
        raise FieldError(
            f"has no field {field!r}",
            f"{name} has no field {field!r}: it has {', '.join(map(repr, there)) or 'none'}. Say in "
            f"prepare.sources which one holds the text: '[{{path: PATH, text_field: {next(iter(there), 'NAME')}}}]'. "
            "Or say which files to read: '[{path: PATH, suffixes: [.txt]}]'.",
        )


def texts_of(records: Iterable[Record], field: str, skip: Skip) -> Iterator[tuple[str, bytes]]:
    """The text of each record. One that has none is skipped by name."""
    wrong: list[tuple[str, FieldError]] | None = []  # until the first text is found
    for place, record in records:
        try:
            text = text_of(record, field, place, skip)
        except FieldError as error:
            if wrong is None:
                skip(place, error.reason)
                continue
            wrong.append((place, error))
            if len(wrong) == WRONG:
                raise wrong[0][1] from None
            continue
        if text is None:
            continue
        for before, error in wrong or ():
            skip(before, error.reason)
        wrong = None
        yield place, text
    if wrong:
        raise wrong[0][1] from None


def text_of(record: Any, field: str, place: str, skip: Skip) -> bytes | None:
    """The text of one record; None if it was skipped.

    Raises:
        FieldError: the record has no such field, or something else than text in it.
    """
    if not isinstance(record, dict):
        return skip(place, "is not a record with fields")
    require_field(field, record, place)
    value = record[field]
    if value is None:
        return skip(place, "is empty")
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape" if is_utf8(value) else "surrogatepass")
    if isinstance(value, bytes):
        return value
    kind = type(value).__name__
    raise FieldError(f"has no text in field {field!r}", f"{place}: field {field!r} holds {kind}, not text. Give another text_field.")


def is_utf8(value: str | bytes) -> bool:
    try:
        value.decode("utf-8") if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    except UnicodeError:
        return False
    return True
