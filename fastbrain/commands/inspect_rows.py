"""metrics.jsonl and guard.jsonl, read line by line: how many rows, of what, and which are none."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.commands.inspect_finding import Finding, Unknown, clean

# longer than any row, and short enough to hold
_LONGEST_LINE = 1 << 20
_LISTED = 3


@dataclass
class Rows:
    """What a file of rows holds.

    Attributes:
        bad: the first few line numbers, from 1, that are not rows.
        torn: whether the last line has no end, as a kill leaves it.
        keys: of the first row.
        last: the last row with each of these keys.
    """

    count: int = 0
    bad: list[int] = field(default_factory=list)
    bad_count: int = 0
    torn: bool = False
    keys: tuple[str, ...] = ()
    starts: int = 0
    steps: tuple[int, int] | None = None
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def fault(self) -> str | None:
        """What is wrong with the file; a torn last line is not, as any kill leaves one."""
        if not self.bad_count:
            return None
        more = f" and {self.bad_count - len(self.bad)} more" * (self.bad_count > len(self.bad))
        return f"line {', '.join(map(str, self.bad))}{more} cannot be read; readers pass over it"


def scan(path: Path) -> Rows:
    """Read a file of rows, a line at a time.

    Raises:
        Io: it cannot be read.
    """
    found = Rows()
    with atomic.io_errors("read", path), path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) < _LONGEST_LINE:
                    found.torn = True
                    break
                while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                line = b""
            row = _row(line)
            if row is None:
                found.bad_count += 1
                if len(found.bad) < _LISTED:
                    found.bad.append(number)
            else:
                _count(found, row)
    return found


def rows(path: Path) -> Finding:
    """A file of lines of JSON.

    Raises:
        Unknown: its rows are not those of a run.
        Io: it cannot be read.
    """
    found = scan(path)
    if found.keys and not {"start", "step"} <= set(found.keys):
        fields = clean(", ".join(found.keys))
        raise Unknown(f"lines of JSON with the fields {fields}; no file of a run has them")
    guard = "kind" in found.keys or path.name == "guard.jsonl"
    what = "skips, spikes and rollbacks" if guard else "steps and evaluations"
    finding = Finding(f"the {what} of a run (lines of JSON)")
    finding.whole, finding.checked = True, "every line being a row; there is no checksum"
    finding.facts = {"rows": found.count, "starts": found.starts}
    if found.steps is not None:
        finding.facts["steps"] = {"first": found.steps[0], "last": found.steps[1]}
    if guard:
        finding.facts["kinds"] = found.kinds
    if not guard:
        finding.facts |= last_facts(found)
    if found.torn:
        finding.notes.append("its last line is torn: a kill or a running trainer leaves one")
    if found.fault:
        finding.damaged(found.fault)
    return finding


def last_facts(found: Rows) -> dict[str, Any]:
    """The last loss and the last score, each with its step."""
    labels = (("loss", "last loss"), ("val_loss", "last score"))
    return {label: found.last[key] for key, label in labels if key in found.last}


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _count(found: Rows, row: dict[str, Any]) -> None:
    found.count += 1
    found.keys = found.keys or tuple(row)
    step, start = row.get("step"), row.get("start")
    if type(start) is int:
        found.starts = max(found.starts, start)
    if type(step) is int:
        first, last = found.steps or (step, step)
        found.steps = min(first, step), max(last, step)
    if isinstance(row.get("kind"), str):
        kind = clean(row["kind"])
        if kind in found.kinds or len(found.kinds) < 10:
            found.kinds[kind] = found.kinds.get(kind, 0) + 1
    for key in ("loss", "val_loss"):
        if key in row:
            found.last[key] = {key: row[key], "step": step}
