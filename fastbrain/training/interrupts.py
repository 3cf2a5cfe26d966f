"""Being asked to stop: a signal is remembered, and the loop looks at a moment of its choosing."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class Interrupts:
    """While entered, a first SIGINT or SIGTERM sets `requested`; a second one acts as usual.

    Args:
        notice: called once with a sentence for the user.
    """

    def __init__(self, notice: Callable[[str], object]) -> None:
        self.requested = False
        self._notice = notice
        self._before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        # only the main thread may set handlers; elsewhere nobody can press Ctrl-C either
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        self._notice("stopping after this step; again to leave at once")

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
