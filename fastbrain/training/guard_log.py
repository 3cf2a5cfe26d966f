"""guard.jsonl: a row for every step that was skipped or spiked, and for every rollback.

Skips and spikes carry where the rows of the step lie in the token file, and the beginning of
their text, so that bad text can be found and mended. Rollbacks are decisions: they are on the disk
before they are carried out, and every later start goes by them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastbrain import atomic
from fastbrain.errors import InvalidSnapshot
from fastbrain.training.guard import Rollback
from fastbrain.training.jsonl import JsonLines, read_lines

Row = dict[str, Any]


class GuardLog(JsonLines):
    """The writer."""

    def note(self, row: Row) -> None:
        """Write a skip or a spike; a failing disk warns once, never stops."""
        self.append([row])

    def decide(self, row: Row) -> None:
        """Write a rollback, and force it to the disk.

        Raises:
            Io: it cannot be written, so it must not be carried out.
        """
        self.append_durably(row)


def read(path: Path) -> list[Row]:
    """All rows in the order of their steps, those that a resume wrote again once. No file: none."""
    with atomic.io_errors("read", path):
        rows = [row for row in read_lines(path) if _is_ours(row)]
    newest = {_identity(row): row for row in rows}
    return sorted(newest.values(), key=lambda row: (row["step"], row["start"]))


def rollbacks(path: Path) -> list[tuple[int, int]]:
    """Every rollback decided, as (first step, rows of steps passed over), in that order.

    Two may be of the same steps: the rows that were read instead were as bad.
    """
    with atomic.io_errors("read", path):
        rows = [row for row in read_lines(path) if _is_ours(row) and row["kind"] == "rollback"]
    return [Rollback(row["first"], row["last"]).passed_over for row in rows]


def mend(path: Path, known: list[list[int]], warn: Callable[[str], object]) -> None:
    """Write rollbacks that a checkpoint knows into a log that was lost.

    Raises:
        InvalidSnapshot: the log has rollbacks, and they are not those.
        Io: it cannot be written.
    """
    logged = [list(each) for each in rollbacks(path)]
    if logged[: len(known)] == known:
        return
    if logged:
        raise InvalidSnapshot(
            f"{path} and the checkpoint disagree about the rollbacks of this run: {logged} there, "
            f"{known} in the checkpoint; put the file back as it was"
        )
    log = GuardLog(path, warn)
    for first, count in known:
        last = first + count - 1
        row = {"start": 0, "kind": "rollback", "step": last + 1, "first": first, "last": last}
        log.decide(row)
    warn(f"warning: {path} had lost the rollbacks that the checkpoint knows; they are back")


def _identity(row: Row) -> tuple[object, ...]:
    # a decision is written once; what a resume sees again it writes again
    again = row["start"] if row["kind"] == "rollback" else row.get("data_step")
    return row["kind"], row["step"], again


def _is_ours(row: Row) -> bool:
    """Whether a line holds what `read` goes by: a file may have been edited."""
    whole = ["step", "start", *(("first", "last") if row.get("kind") == "rollback" else ())]
    return (
        row.get("kind") in ("skip", "spike", "rollback")
        and all(type(row.get(key)) is int for key in whole)
        and type(row.get("data_step")) in (int, type(None))
    )
