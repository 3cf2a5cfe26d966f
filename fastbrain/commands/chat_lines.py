"""What a user of `fastbrain chat` types or pipes in, line by line."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress

from fastbrain.errors import InvalidDataset

_ROLES = ("system", "user", "assistant")


def typed() -> Iterator[str]:
    """The lines typed at a terminal, until Ctrl-D."""
    with suppress(ImportError):  # gives input() a history
        importlib.import_module("readline")
    while True:
        try:
            line = input("> ")
            line.encode()
            yield line
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")
        except UnicodeError:
            print("(that was not UTF-8)")


def piped() -> Iterator[str]:
    """The lines of standard input; InvalidDataset, with the line, for what is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.rstrip(b"\r\n").decode()
        except UnicodeDecodeError as error:
            raise InvalidDataset(
                f"standard input, line {number}: it is not UTF-8: there is a byte "
                f"{line[error.start]:#x} at {error.start}"
            ) from error


def messages() -> Iterator[dict[str, str]]:
    """The messages of standard input: a line is one, as an object of JSON or as plain text.

    Raises:
        InvalidDataset: a line that begins as an object and is no message; names the line.
    """
    for number, line in enumerate(piped(), 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            yield _message(line, number)
        else:
            yield {"role": "user", "content": line}


def _message(line: str, number: int) -> dict[str, str]:
    place = f"standard input, line {number}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(f"{place}: it is not JSON: {error}") from error
    role, content = found.get("role"), found.get("content")
    if role not in _ROLES:
        raise InvalidDataset(f'{place}: "role" must be {", ".join(_ROLES)}, got {role!r}')
    if not isinstance(content, str):
        raise InvalidDataset(f'{place}: "content" must be text, got {content!r}')
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise InvalidDataset(f'{place}: "content" has half of a surrogate pair') from error
    return {"role": role, "content": content}
