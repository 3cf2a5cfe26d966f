"""Documents out of parquet tables: one for each row, from one column, a few rows at a time."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

from fastbrain import atomic
from fastbrain.errors import InvalidDataset
from fastbrain.tokens.documents import Document, Read, Tally
from fastbrain.tokens.faults import Faults
from fastbrain.tokens.json_line import PIECE, BadText, not_utf8

_ROWS = 64  # made into Python's strings at once
_BUFFER = 1 << 20  # bytes of a column read at once, so that a row group need not fit in memory


def parquet_rows(
    path: atomic.StrPath, field: str, faults: Faults, tally: Tally, read: Read
) -> Iterator[Document]:
    """The strings in the column `field` of a parquet table, in order.

    A row without a string goes to `faults`, counted from 1. Raises InvalidDataset for a file that
    is no parquet table, is damaged, or has no column of strings under that name; and where
    pyarrow is not installed.
    """
    arrow = require_pyarrow(path)
    parquet = importlib.import_module("pyarrow.parquet")
    with atomic.io_errors("read", path):
        size = os.stat(path).st_size
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as table:
            _check_column(table.schema_arrow, field, path, arrow)
            total = max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(_ROWS, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    read(size * number // total)
                    try:
                        text = _text(value, field)
                    except BadText as error:
                        faults.add(path, number, str(error), "row")
                        continue
                    tally.documents += 1
                    tally.text_bytes += len(text.encode())
                    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
                    yield Document(f"{os.fspath(path)}, row {number}", pieces)
    except arrow.ArrowException as error:
        raise _damaged(path, number, error) from error
    except OSError as error:
        # pyarrow reports a page that cannot be unpacked as one, without a number
        if error.errno is None:
            raise _damaged(path, number, error) from error
        with atomic.io_errors("read", path):
            raise


def require_pyarrow(path: atomic.StrPath) -> Any:
    """The package that reads parquet; InvalidDataset where it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise InvalidDataset(
            f"{os.fspath(path)} is a parquet table, which needs a package that is not installed: "
            "`pip install 'fastbrain[parquet]'`, or save the table as JSON lines first"
        ) from error


def _check_column(schema: Any, field: str, path: atomic.StrPath, arrow: Any) -> None:
    found = schema.get_field_index(field)
    if found < 0:
        there = ", ".join(repr(name[:40]) for name in schema.names[:8]) or "none at all"
        raise InvalidDataset(f"{os.fspath(path)} has no column {field!r}; its columns are {there}")
    kind = schema.field(found).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise InvalidDataset(
            f"the column {field!r} of {os.fspath(path)} holds {kind}, not strings; choose another"
        )


def _text(value: Any, field: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise not_utf8(error) from error
    if not isinstance(text, str):
        raise BadText(f"its field {field!r} is null, not a string")
    return text


def _damaged(path: atomic.StrPath, rows: int, error: Exception) -> InvalidDataset:
    reason = " ".join(str(error).split())
    return InvalidDataset(
        f"{os.fspath(path)} is not a parquet table, or is damaged, after {rows} rows: {reason}"
    )
