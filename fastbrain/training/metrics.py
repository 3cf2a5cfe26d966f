"""metrics.jsonl: a row for every step and every evaluation, and the one history that they tell.

Rows are only ever appended. A run that was killed leaves a torn last line, and one that resumes
runs some steps again; so every row carries `start`, the how-manieth start of the run wrote it, and
`read` keeps of every earlier start only what the later ones did not run again.

The step of a row is the number of steps finished when it was written: the row of the first step
has 1, and an evaluation of checkpoint step-00000500 has 500.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastbrain import atomic

Row = dict[str, Any]


class Metrics:
    """The writer: appends rows for one start of a run. A failing disk warns once, never stops.

    Args:
        path: the file; created when missing, its torn last line dropped.
        warn: called with one sentence when rows can no longer be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self.path = path
        self._warn = warn
        self._dead = False
        with atomic.io_errors("write", path):
            path.touch()
            whole = _whole_lines(path)
            os.truncate(path, len(whole))
        self.start = 1 + max((row["start"] for row in _parse(whole)), default=0)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; each gets this start's number. NaN and infinity are written as null."""
        lines = [json.dumps(_finite({"start": self.start, **row})) + "\n" for row in rows]
        if self._dead or not lines:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            self._dead = True
            self._warn(f"{self.path} can no longer be written ({error.strerror}); training goes on")

    def sync(self) -> None:
        """Force the rows to the disk: called before a checkpoint of their steps is committed."""
        try:
            with self.path.open("ab") as file:
                os.fsync(file.fileno())
        except OSError:
            pass  # append has said so, or will


def read(path: Path) -> list[Row]:
    """The merged history, in order of steps: every step once, from the newest start that ran it.

    A start supersedes every row of an earlier one from its own first step on, also those that it
    has not reached yet: they belong to a history that was given up.
    """
    with atomic.io_errors("read", path):
        rows = _parse(_whole_lines(path))
    kept: list[Row] = []
    limit = math.inf
    for start in sorted({row["start"] for row in rows}, reverse=True):
        own = [row for row in rows if row["start"] == start]
        kept += [row for row in own if row["step"] < limit]
        limit = min([limit, *(row["step"] for row in own if "loss" in row)])
    newest = {("loss" in row, row["step"]): row for row in sorted(kept, key=_by_start)}
    return sorted(newest.values(), key=lambda row: (row["step"], "loss" not in row))


def _by_start(row: Row) -> int:
    return int(row["start"])


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _parse(content: bytes) -> list[Row]:
    rows = []
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn by a power loss in the middle of the file, or blank
        if isinstance(row, dict) and "step" in row and "start" in row:
            rows.append(row)
    return rows


def _finite(row: Row) -> Row:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
