"""What a run writes down as it goes: numbers, bad steps, curves. One rank keeps the books."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastbrain.training.guard_log import GuardLog
from fastbrain.training.metrics import Metrics
from fastbrain.training.run_dir import RunDir
from fastbrain.training.sinks import TensorBoard


class Books:
    """The writers of one start of a run.

    Args:
        run: its directory; None for a rank that writes nothing.
        say: takes a sentence when something can no longer be written.
    """

    def __init__(self, run: RunDir | None, say: Callable[[str], object]) -> None:
        self._metrics = self._guard_log = self._board = None
        if run is not None:
            self._metrics = Metrics(run.metrics, say)
            self._guard_log = GuardLog(run.guard_log, say)
            self._board = TensorBoard(run.path / "tensorboard", say)

    def log(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of steps and evaluations."""
        found = list(rows)
        if self._metrics is not None and self._board is not None:
            self._metrics.append(found)
            self._board.write(found)

    def note(self, row: Mapping[str, Any]) -> None:
        """Write a skip or a spike."""
        if self._metrics is not None and self._guard_log is not None:
            self._guard_log.note({"start": self._metrics.start, **row})

    def decide(self, row: Mapping[str, Any]) -> None:
        """Write a rollback, and force it to the disk.

        Raises:
            Io: it cannot be written, so it must not be carried out.
        """
        if self._metrics is not None and self._guard_log is not None:
            self._guard_log.decide({"start": self._metrics.start, **row})

    def start_anew(self) -> None:
        """Say that rows from here on are of a history that takes another's place."""
        if self._metrics is not None:
            self._metrics.start += 1

    def sync(self) -> None:
        """Force the rows of steps to the disk, where they still can be."""
        if self._metrics is not None:
            self._metrics.sync()

    def close(self) -> None:
        """Write what is left."""
        if self._board is not None:
            self._board.close()
