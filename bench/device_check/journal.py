"""What a part has found so far, in a file that outlives its process."""

import json
import os
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A case cannot run on this machine; the message says why."""


class Journal:
    """The cases of one part, written after every change.

    Attributes:
        cases: what was found, by case.
        running: the case that has begun and not ended.
        left_out: the first case that there was no time for.
        done: whether no case remains.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.cases: dict[str, dict[str, Any]] = kept.get("cases", {})
        self.running: str | None = kept.get("running")
        self.left_out: str | None = kept.get("left_out")
        self.done: bool = kept.get("done", False)

    def begin(self, case: str) -> None:
        self.running = case
        self.write()

    def end(self, found: dict[str, Any]) -> None:
        """Keeps what the running case found."""
        assert self.running is not None
        self.cases[self.running] = found
        self.running = None
        self.write()

    def write(self) -> None:
        kept = {name: value for name, value in vars(self).items() if name != "_path"}
        text = json.dumps(finite(kept), allow_nan=False)
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        # a process that is killed here leaves the file of before
        os.replace(beside, self._path)


def finite(value: Any) -> Any:
    """The same with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
