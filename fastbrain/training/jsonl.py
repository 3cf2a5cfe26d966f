"""Files of JSON lines that are only ever appended to, and read while they are written.

A killed writer leaves a torn last line, which the next one drops; what a power loss tears in the
middle is passed over.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastbrain import atomic

Row = dict[str, Any]


class JsonLines:
    """The writer. A failing disk warns once and loses rows, but never stops.

    Args:
        path: the file; created when missing, its torn last line dropped.
        warn: called with one sentence when rows can no longer be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self.path = path
        self._warn = warn
        self._warned = False
        # after a write that failed the file may end in half a line
        self._torn = False
        with atomic.io_errors("write", path):
            path.touch()
            os.truncate(path, len(_whole_lines(path)))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows. NaN and infinity are written as null."""
        text = "".join(_line(row) for row in rows)
        try:
            self._write(text)
        except OSError as error:
            if not self._warned:
                self._warn(f"{self.path} cannot be written ({error.strerror}); training goes on")
            self._warned = True

    def append_durably(self, row: Mapping[str, Any]) -> None:
        """Write a row and force it to the disk.

        Raises:
            Io: it is not sure to be there.
        """
        with atomic.io_errors("write", self.path):
            self._write(_line(row))
            with self.path.open("ab") as file:
                atomic.fsync(file.fileno())
            atomic.sync_dir(self.path.parent)

    def sync(self) -> None:
        """Force the rows to the disk, where they still can be."""
        try:
            with self.path.open("ab") as file:
                atomic.fsync(file.fileno())
        except OSError:
            pass  # append has said so, or will

    def _write(self, text: str) -> None:
        if not text:
            return
        with self.path.open("ab") as file:
            torn, self._torn = self._torn, True
            file.write(("\n" * torn + text).encode())
        self._torn = False


def read_lines(path: Path) -> list[Row]:
    """Every whole line that is a JSON object, in order; none where there is no file."""
    try:
        content = _whole_lines(path)
    except FileNotFoundError:
        return []
    rows = []
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a power loss in the middle of the file, or blank
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in row.items()}) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]
