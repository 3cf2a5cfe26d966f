"""JSON for files that others read to the byte, and from files that may be hostile.

Python's own reader recurses as deep as a text goes and lets the last of two equal keys win; its
writer knows only 64-bit floats. What a text may hold is bounded here before it is parsed.
"""

import json
import re
import struct
from typing import Any

import numpy as np

from fastbrain.errors import InvalidConfig, Serde

MAX_DEPTH = 8

# up to the next bracket that is not inside a string; possessive, so that no text makes it go back
_BRACKET = re.compile(r'(?:[^\[\]{}"]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}])', re.DOTALL)


def loads(data: bytes) -> Any:
    """Parse JSON from a file that may be hostile.

    Raises:
        Serde: not UTF-8 or not JSON, nested deeper than 8, a key twice in one object, NaN or
            Infinity, or an integer of thousands of digits.
    """
    try:
        text = data.decode()
        _check_depth(text)
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except Serde:
        raise
    except (ValueError, RecursionError) as error:
        raise Serde(f"this is not valid JSON: {error}") from error


def dumps(value: Any) -> str:
    """Compact JSON in the crate's spelling.

    Floats are written as the shortest digits that read back to the same 32-bit value: plain from
    1e-6 up (`0.000001`, `10000.0`), else as `1e-7` or `1.5e-8`.

    Raises:
        InvalidConfig: a float is not finite or has no 32-bit value; names its key.
    """
    return _spell(value, "the value")


def _spell(value: Any, where: str) -> str:
    match value:
        case dict():
            pairs = (f"{json.dumps(key)}:{_spell(each, key)}" for key, each in value.items())
            return "{" + ",".join(pairs) + "}"
        case list() | tuple():
            return "[" + ",".join(_spell(each, where) for each in value) + "]"
        case float():
            number = float32(value, where, InvalidConfig)
            if number and abs(number) < np.float32(1e-6):
                return np.format_float_scientific(number, trim="-", exp_digits=1)
            return np.format_float_positional(number, trim="0")
        case _:
            return json.dumps(value)


def float32(value: float, where: str, kind: type[Exception]) -> np.float32:
    try:
        [number] = struct.unpack("<f", struct.pack("<f", value))
    except (OverflowError, struct.error):  # the second for an integer of hundreds of digits
        number = float("inf")
    if not np.isfinite(number):
        raise kind(f"{where} must be a finite 32-bit number, not {short(value)}")
    return np.float32(number)


def _check_depth(text: str) -> None:
    # the parser would recurse as deep as the text goes
    depth = position = 0
    while found := _BRACKET.match(text, position):
        position = found.end()
        depth += 1 if found[1] in "[{" else -1
        if depth > MAX_DEPTH:
            raise Serde(
                f"its JSON is nested deeper than {MAX_DEPTH} levels, at character {position}"
            )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Serde(f"its JSON has the key {short(key)} twice in one object")
            seen.add(key)
    return found


def _no_constant(name: str) -> Any:
    raise Serde(f"its JSON holds {name}, which is not a number")


def short(value: Any) -> str:
    # a hostile value can be a megabyte long, and hold what a terminal cannot print
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
