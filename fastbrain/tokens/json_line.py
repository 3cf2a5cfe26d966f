"""One field of one line of JSON, as text that is decoded a little at a time.

A line may be larger than memory allows for three copies of it, one of which may take four bytes
for each letter. So in a long line the long strings are set aside unread, what is left is parsed
as usual, and the string that was wanted is decoded piece by piece.
"""

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

PIECE = 1 << 16  # characters, more or less, that a long text is handled by
_LONG_LINE = 1 << 20
_LONG_STRING = 1 << 16


class BadText(Exception):
    """Why a line, or a text file, cannot be used."""


def field_text(line: bytes, field: str) -> tuple[Iterable[str], int]:
    """The string under `field` in a line of JSON, in pieces; and its length in UTF-8 bytes.

    Raises BadText if the line is not JSON in UTF-8, or has no such string, or one that holds half
    of a surrogate pair. The pieces can be gone over again.
    """
    aside: dict[str, Iterable[str]] = {}
    if len(line) > _LONG_LINE:
        parsed, aside = _without_long_strings(line)
    else:
        parsed = line.rstrip(b"\r\n")  # else they are what is wrong with a string that has no end
    whole = _string_under(field, loads(parsed))
    pieces = aside[whole] if whole in aside else _Pieces(whole)
    try:
        return pieces, sum(len(piece.encode()) for piece in pieces)
    except UnicodeEncodeError as error:
        raise BadText(f"the field {field!r} holds half of a surrogate pair") from error


def not_utf8(error: UnicodeDecodeError) -> BadText:
    """Says which byte, and after what, since its offset means little in a line of megabytes."""
    before = error.object[max(0, error.start - 24) : error.start].decode(errors="replace")
    return BadText(
        f"it is not UTF-8: there is a byte {error.object[error.start]:#x} after {before!r}"
    )


@dataclass(frozen=True)
class _Pieces:
    """A text that is in memory as it is."""

    text: str

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.text), PIECE):
            yield self.text[start : start + PIECE]


@dataclass(frozen=True)
class _RawPieces:
    """A text that is in memory as the inside of a JSON string, line[start:end]."""

    line: bytes
    start: int
    end: int

    def __iter__(self) -> Iterator[str]:
        at = self.start
        while at < self.end:
            # no escape and no character has a space inside it
            cut = self.line.find(b" ", at + PIECE, self.end)
            cut = self.end if cut < 0 else cut
            yield str(loads(b'"' + self.line[at:cut] + b'"'))
            at = cut


def _without_long_strings(line: bytes) -> tuple[bytes, dict[str, Iterable[str]]]:
    """The line with a stand-in for each long string, and the strings by their stand-ins."""
    unguessable = secrets.token_hex(16)  # no string of the line is a stand-in by itself
    aside: dict[str, Iterable[str]] = {}
    kept, done, at = [], 0, 0
    while (start := line.find(b'"', at) + 1) > 0:
        end = _string_end(line, start)
        if end - start > _LONG_STRING:
            name = f"{unguessable} {len(aside)}"
            aside[name] = _RawPieces(line, start, end)
            kept += [line[done:start], name.encode()]
            done = end
        at = end + 1
    return b"".join([*kept, line[done:]]), aside


def _string_end(line: bytes, start: int) -> int:
    """Where the closing quote is of the string whose inside begins at `start`."""
    at = line.find(b'"', start)
    while at >= 0:
        first = at
        while line[first - 1] == ord("\\"):
            first -= 1
        if (at - first) % 2 == 0:  # backslashes in pairs stand for themselves
            return at
        at = line.find(b'"', at + 1)
    raise BadText("it is not JSON: a string in it does not end")


def loads(data: bytes) -> Any:
    """What JSON in UTF-8 says; BadText where it is none."""
    try:
        return _JSON.decode(data.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(error) from error
    except RecursionError as error:
        raise BadText("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        if b"\0" in data:
            raise BadText("it holds NUL bytes, as files have after a crash") from error
        near = error.doc[max(0, error.pos - 24) : error.pos + 8]
        raise BadText(f"it is not JSON: {error.msg.lower()}, near {near!r}") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadText(f"it is not JSON that can be read: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise BadText(f"it is not JSON: {name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _string_under(field: str, found: Any) -> str:
    if not isinstance(found, dict):
        raise BadText(f"it is {kind_of(found)}, not an object with a field {field!r}")
    if field not in found:
        there = ", ".join(repr(key[:40]) for key in list(found)[:5]) or "no fields at all"
        raise BadText(f"it has no field {field!r}; it has {there}")
    text = found[field]
    if not isinstance(text, str):
        raise BadText(f"its field {field!r} is {kind_of(text)}, not a string")
    return text


def kind_of(value: object) -> str:
    """What a value is called in JSON, with an article."""
    names = {dict: "an object", list: "a list", bool: "a boolean", str: "a string"}
    return "null" if value is None else names.get(type(value), "a number")
