"""metrics.jsonl: a row for every step and every evaluation, and the one history that they tell.

Rows are only ever appended. A run that resumes or goes back runs some steps again; so every row
carries `start`, the how-manieth start of the run wrote it, and `read` keeps of every earlier start
only what the later ones did not run again.

The step of a row is the number of steps finished when it was written: the row of the first step
has 1, and an evaluation of checkpoint step-00000500 has 500.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.training.jsonl import JsonLines, read_lines

Row = dict[str, Any]


class Metrics(JsonLines):
    """The writer for one start of a run; `sync` is for before a checkpoint of its rows' steps."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        super().__init__(path, warn)
        self.start = 1 + max((row["start"] for row in _rows(path)), default=0)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; each gets this start's number. NaN and infinity are written as null."""
        super().append({"start": self.start, **row} for row in rows)


def read(path: Path) -> list[Row]:
    """The merged history, in order of steps: every step once, from the newest start that ran it.

    A start supersedes every row of an earlier one from its own first step on, also those that it
    has not reached yet: they belong to a history that was given up.
    """
    with atomic.io_errors("read", path):
        by_start: dict[int, list[Row]] = {}
        for row in _rows(path):
            by_start.setdefault(row["start"], []).append(row)
    kept: list[Row] = []
    limit = math.inf
    for start in sorted(by_start, reverse=True):
        kept += [row for row in by_start[start] if row["step"] < limit]
        limit = min([limit, *(row["step"] for row in by_start[start] if "loss" in row)])
    newest = {("loss" in row, row["step"]): row for row in sorted(kept, key=_by_start)}
    return sorted(newest.values(), key=lambda row: (row["step"], "loss" not in row))


def _by_start(row: Row) -> int:
    return int(row["start"])


def _rows(path: Path) -> list[Row]:
    return [
        row
        for row in read_lines(path)
        if _is_whole(row.get("step")) and _is_whole(row.get("start"))
    ]


def _is_whole(value: object) -> bool:
    return type(value) is int
