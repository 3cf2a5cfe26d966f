"""TOML from files that may be hostile.

Python's own reader recurses as deep as a text nests, takes time in the square of a key's parts, and
makes hexadecimal numbers of any length, which cannot even be printed. All of it is bounded here.
"""

import re
import tomllib
from typing import Any

from fastbrain.errors import Serde

MAX_BYTES = 1 << 16  # a configuration has some hundred lines

# begins only where a word begins, and never goes back: no text makes it slow
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++\s*+\.\s*+){100}""")


def loads(data: bytes) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        Serde: not UTF-8 or not TOML, more than 64 KiB, a key of more than 100 parts, nested too
            deep, or an integer of more than 64 bits.
    """
    if len(data) > MAX_BYTES:
        raise Serde(f"it has more than the {MAX_BYTES} bytes allowed")
    try:
        text = data.decode()
        if _LONG_KEY.search(text):
            raise Serde("it has a key of more than 100 parts")
        found = tomllib.loads(text)
    except Serde:
        raise
    except RecursionError as error:
        raise Serde("it is nested too deep") from error
    except ValueError as error:
        raise Serde(f"it is not valid TOML: {str(error)[:300]}") from error
    _check_numbers(found)
    return found


def _check_numbers(found: dict[str, Any]) -> None:
    left: list[Any] = [found]
    while left:
        match left.pop():
            case dict() as table:
                left += table.values()
            case list() as values:
                left += values
            case bool():
                pass
            case int() as number if not -(2**63) <= number < 2**63:
                raise Serde("it has an integer of more than 64 bits")
