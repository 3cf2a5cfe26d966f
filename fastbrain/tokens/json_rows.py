"""The objects of JSON lines, each with the number of its line."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastbrain.tokens.documents import Read, is_blank, lines, refuse_utf16
from fastbrain.tokens.json_line import BadText, kind_of, loads
from fastbrain.tokens.opened import opened

# two million tokens of text; a tokenizer takes some 250 bytes of memory for each byte
_MOST_BYTES = 1 << 23

Row = dict[str, Any]


class BadRow(BadText):
    """Why a row cannot be learned from; `kind` says it in the words that rows are counted by."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def json_rows(path: Path, read: Read = lambda count: None) -> Iterator[tuple[int, Row | BadRow]]:
    """For each line its number, from 1, and its object or what is wrong with it.

    The file may be packed by gzip or zstd. Lines end at "\\n" only. Those of nothing but white
    space are passed over, and so is a byte order mark before the first. Of a key that comes twice
    the last counts. `read` is told how many bytes of the file were read. An archive that breaks off
    is InvalidDataset.
    """
    with opened(path) as source:
        for number, line in enumerate(lines(source, path), 1):
            read(source.read_bytes())
            try:
                if number == 1:
                    refuse_utf16(line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not is_blank(line):
                    yield number, _object(line)
            except BadRow as error:
                yield number, error
            except BadText as error:
                yield number, BadRow("not a line of JSON", str(error))


def _object(line: bytes) -> Row:
    if len(line) > _MOST_BYTES:
        raise BadRow("too long", f"it has {len(line):,} bytes; at most {_MOST_BYTES:,} are read")
    found = loads(line.rstrip(b"\r\n"))
    if not isinstance(found, dict):
        raise BadText(f"it is {kind_of(found)}, not an object")
    return found
