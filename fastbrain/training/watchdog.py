"""A run that hangs says where: when no step ends for long, every thread's stack is written down."""

import faulthandler
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Self

# no step for this many times the usual is a hang, and never less than this: a machine may stutter
TIMES, LEAST_S = 10, 30.0
# the first steps compile and warm caches up, so they say nothing of the usual
WARM = 8


class Watchdog:
    """While entered, a thread watches the time since the last `beat`.

    Args:
        path: the stacks are appended to this file, once for every hang.
        notice: called with one sentence then.
        least_s: seconds below which nothing is a hang.
    """

    def __init__(
        self, path: Path, notice: Callable[[str], object], least_s: float = LEAST_S
    ) -> None:
        self._path = path
        self._notice = notice
        self._least_s = least_s
        self._steps: deque[float] = deque(maxlen=64)
        self._beats = 0
        self._last: float | None = None
        self._reported = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def beat(self) -> None:
        """Say that a step has ended."""
        now = time.monotonic()
        self._beats += 1
        if self._last is not None and self._beats > WARM:
            self._steps.append(now - self._last)
        self._last, self._reported = now, False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do something that takes its own time: an evaluation, a save."""
        self._last = None
        try:
            yield
        finally:
            # the step that follows is measured from here
            self._last = time.monotonic() if self._beats else None

    def _watch(self) -> None:
        while not self._over.wait(self._least_s / 10):
            last, steps = self._last, list(self._steps)
            if last is None or self._reported or not steps:
                continue
            silent = time.monotonic() - last
            if silent > max(TIMES * median(steps), self._least_s):
                self._reported = True
                self._report(silent, median(steps))

    def _report(self, silent: float, usual: float) -> None:
        where = f"the stacks of all threads are in {self._path}"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(time.strftime("%Y-%m-%d %H:%M:%S") + f", no step for {silent:.0f} s\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            where = f"their stacks cannot be written to {self._path}: {error.strerror}"
        self._notice(
            f"warning: no step has ended for {silent:.0f} s, and one usually takes {usual:.2g} s; "
            f"{where}"
        )
