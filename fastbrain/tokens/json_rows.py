"""The objects of JSON lines, each with the number of its line."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastbrain import atomic
from fastbrain.errors import InvalidDataset
from fastbrain.tokens.documents import Read
from fastbrain.tokens.json_line import BadText, not_utf8
from fastbrain.tokens.opened import Damaged, Opened, opened

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
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
        for number, line in enumerate(_lines(source, path), 1):
            read(source.read_bytes())
            try:
                if number == 1:
                    if line.startswith(_UTF16):
                        raise BadText("the file is UTF-16; save it as UTF-8")
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.decode(errors="replace").strip():
                    yield number, _object(line)
            except BadRow as error:
                yield number, error
            except BadText as error:
                yield number, BadRow("not a line of JSON", str(error))


def kind_of(value: object) -> str:
    """What a value is called in JSON, with an article."""
    names = {dict: "an object", list: "a list", bool: "a boolean", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")


def _lines(source: Opened, path: Path) -> Iterator[bytes]:
    done = 0
    try:
        with atomic.io_errors("read", path):
            for line in source.stream:
                yield line
                done += 1
    except Damaged as error:
        raise InvalidDataset(f"{path}, line {done + 1}: {error}") from error


def _object(line: bytes) -> Row:
    if len(line) > _MOST_BYTES:
        raise BadRow("too long", f"it has {len(line):,} bytes; at most {_MOST_BYTES:,} are read")
    try:
        found = _JSON.decode(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise not_utf8(error) from error
    except RecursionError as error:
        raise BadText("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        if b"\0" in line:
            raise BadText("it holds NUL bytes, as files have after a crash") from error
        near = error.doc[max(0, error.pos - 24) : error.pos + 8]
        raise BadText(f"it is not JSON: {error.msg.lower()}, near {near!r}") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadText(f"it is not JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise BadText(f"it is {kind_of(found)}, not an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise BadText(f"it is not JSON: {name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
