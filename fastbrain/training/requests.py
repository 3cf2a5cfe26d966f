"""Being asked to stop or to save: it is remembered, and the loop looks at a moment of its choosing.

Signals come from a terminal, a scheduler or a shutdown. Files work from anywhere that sees the
run's directory: STOP in it saves and stops, SAVE saves and goes on.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self

STOP, SAVE = "STOP", "SAVE"

# Windows knows the first two alone
_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
]


class Requests:
    """While entered, SIGINT, SIGTERM, SIGHUP, SIGUSR1 or a STOP file ask the run to stop.

    After any of them a Ctrl-C (SIGINT) acts as usual and leaves at once. What was ignored when the
    program started stays ignored, as SIGHUP under nohup and SIGINT for a script's job with `&`.

    Args:
        run: the run's directory; files left from before are removed. None for a process that
            leaves them to another.
        notice: called once with a sentence for the user.
    """

    def __init__(self, run: Path | None, notice: Callable[[str], object]) -> None:
        self._run = run
        self._notice = notice
        self._stop = False
        self._before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        self._take(STOP)
        self._take(SAVE)
        # only the main thread may set handlers; elsewhere nobody can press Ctrl-C either
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            self._restore(next(iter(self._before)))

    def stop(self) -> bool:
        """Whether the run is to save and stop."""
        if not self._stop and self._take(STOP):
            self._stop = True
            self._notice("found STOP: stopping after this step")
        return self._stop

    def save(self) -> bool:
        """Whether a checkpoint is wanted now; says so once."""
        return self._take(SAVE)

    def _take(self, name: str) -> bool:
        if self._run is None or not (path := self._run / name).is_file():
            return False
        with suppress(OSError):
            path.unlink()
        return True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first, self._stop = not self._stop, True
        self._restore(signal.SIGINT)
        if first:
            self._notice(
                f"{signal.Signals(number).name}: stopping after this step; Ctrl-C to leave at once"
            )

    def _restore(self, number: int) -> None:
        handler = self._before.pop(number, None)
        if handler is not None:
            signal.signal(number, handler)
