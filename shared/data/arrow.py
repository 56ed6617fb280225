"""Chapter 03. Rows of Arrow tables (Parquet, saved datasets) as the values that the same rows have in JSON.

Three things differ otherwise, and none of them raises an error. Arrow gives every struct of a column the union of all keys, with null where
a record had none: those nulls are left out, in lists and structs at any depth. A field whose values differ in type is JSON text (`Json` of
datasets 5, Arrow's `arrow.json`): it is parsed, and keeps the nulls that it says. Text that looks like a date has become one: a day is text
again, `2024-01-31`.

Left out on purpose: times of day. Whether the text had a space, a T or a zone is lost, so such a value stays a `datetime`, which readers
refuse. The order of a struct's keys, which is the column's, and the digits that datasets' JSON text leaves out of a float behind the tenth.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time
from typing import Any

from shared.corpus import CorpusError

Change = Callable[[Any], Any]


def rows_of(batches: Iterable[Any], name: str) -> Iterator[dict[str, Any]]:
    """The rows of Arrow batches or tables; a field without a value is left out.

    Raises:
        CorpusError: their memory is a damaged file's.
    """
    import pyarrow

    try:
        for batch in batches:
            batch.validate(full=True)
            changes = {field.name: change for field in batch.schema if (change := change_of(field.type))}
            for row in batch.to_pylist():
                yield {key: changes[key](value) if key in changes else value for key, value in row.items() if value is not None}
    except (pyarrow.ArrowException, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CorpusError(f"{name} is damaged ({reason}): make it again.") from None


def change_of(kind: Any) -> Change | None:
    """What turns a value of this Arrow type, as `to_pylist` gives it, into JSON's; None where it is that already. Nulls stay null."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return known(json.loads)
    if isinstance(kind, extension_type()):
        return change_of(kind.storage_type)
    if types.is_dictionary(kind):
        return change_of(kind.value_type)
    if types.is_struct(kind):
        return known(change_struct({field.name: change_of(field.type) for field in kind}))
    if types.is_map(kind):
        of_item = change_of(kind.item_type) or (lambda value: value)
        return known(lambda pairs: {key: of_item(value) for key, value in pairs})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of_item = change_of(kind.value_type)
        return known(lambda items: [of_item(item) for item in items]) if of_item else None
    return known(day_as_text) if types.is_temporal(kind) else None


def extension_type() -> type:
    import pyarrow

    return pyarrow.BaseExtensionType


def known(change: Change) -> Change:
    return lambda value: None if value is None else change(value)


def change_struct(fields: dict[str, Change | None]) -> Change:
    def change(struct: dict[str, Any]) -> dict[str, Any]:
        there = ((name, value) for name, value in struct.items() if value is not None)
        return {name: of_field(value) if (of_field := fields[name]) else value for name, value in there}

    return change


def day_as_text(value: Any) -> Any:
    """A day as ISO 8601 text; a time of day as it is."""
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() and value.tzinfo is None else value
    return value.isoformat() if isinstance(value, date) else value
