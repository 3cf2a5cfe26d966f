"""Checkpoints written while training goes on: one thread, one at a time, no failure unheard."""

import threading
from collections.abc import Callable

from fastbrain.errors import Io

# so many saves in a row that a disk refused end a run; before that it trains on
MOST_FAILURES = 3


class Saver:
    """Writes what it is given in a thread of its own.

    Args:
        warn: called with one sentence when a save failed and training goes on.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failures = 0

    def start(self, write: Callable[[], object]) -> None:
        """Begin a save, once the one before it is through.

        Args:
            write: writes and commits; what it reads must be its own.

        Raises:
            what `check` raises of the save before.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Hear of a save that has ended, without waiting for one that has not.

        Raises:
            Io: the disk refused the last `MOST_FAILURES` saves.
            Exception: any other error of a save, at once.
        """
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        if not isinstance(error, Io):
            raise error
        if self._failures >= MOST_FAILURES:
            raise Io(
                f"{self._failures} saves in a row have failed; the last one: {error}"
            ) from error
        self._warn(
            f"warning: A CHECKPOINT COULD NOT BE SAVED: {error}; training goes on, and stops after "
            f"{MOST_FAILURES} such failures in a row"
        )

    def wait(self) -> None:
        """Wait for the save in flight, and `check`."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def abandon(self) -> None:
        """Wait for the save in flight and forget how it ended: something worse has happened."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._error = None, None

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:  # the main thread raises it
            self._error = error
