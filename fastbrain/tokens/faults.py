"""What to do about a document that cannot be read: stop, or leave it out and say so."""

import os
import warnings
from collections.abc import Callable
from typing import Literal, TypeAlias

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidDataset

OnError: TypeAlias = Literal["fail", "skip"]
OnSkip: TypeAlias = Callable[[int, str], None]


class Faults:
    """The bad documents of one pass.

    With "fail" the first one raises InvalidDataset. With "skip" each is counted and handed to
    `on_skip(line, reason)`; without that function `report` warns of all of them at once.

    Attributes:
        skipped: how many there were.
    """

    def __init__(self, on_error: OnError, on_skip: OnSkip | None = None) -> None:
        if on_error not in ("fail", "skip"):
            raise InvalidConfig(f"on_error is {on_error!r}; it must be 'fail' or 'skip'")
        self.skipped = 0
        self._fail = on_error == "fail"
        self._on_skip = on_skip
        self._first = ""

    def add(self, path: atomic.StrPath, line: int, reason: str, unit: str = "line") -> None:
        """A document that begins in this line, counted from 1, is bad for this reason.

        `unit` is what is counted where it is not lines.
        """
        found = f"{os.fspath(path)}, {unit} {line}: {reason}"
        if self._fail:
            raise InvalidDataset(f"{found}")
        self.skipped += 1
        self._first = self._first or found
        if self._on_skip:
            self._on_skip(line, reason)

    def report(self, read: int) -> None:
        """Warn once if any were skipped; `read` is how many documents were fine."""
        if self.skipped and not self._on_skip:
            warnings.warn(
                f"{self.skipped} of {read + self.skipped} documents were skipped; the first was "
                f"{self._first}",
                stacklevel=3,
            )
