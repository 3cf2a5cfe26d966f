"""A line on the terminal that says how far a long pass over files has come."""

import sys
import time
from types import TracebackType
from typing import Self

_PERIOD = 0.2  # seconds between two redrawings


class Progress:
    """Shows bytes done, tokens made and the time left on standard error, while it is entered.

    `shown` None shows it on a terminal only. That the terminal goes away is no error.
    """

    def __init__(self, name: str, total_bytes: int, shown: bool | None = None) -> None:
        self._name = name
        self._total = max(total_bytes, 1)
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = terminal if shown is None else shown
        self._start = self._last = time.monotonic()
        self._text = ""

    def update(self, done_bytes: int, tokens: int) -> None:
        """Redraw, unless that was done just now."""
        now = time.monotonic()
        if not self._shown or now - self._last < _PERIOD:
            return
        self._last = now
        seconds = now - self._start
        left = seconds * (self._total - done_bytes) / max(done_bytes, 1)
        self._draw(
            f"{self._name}  {100 * done_bytes / self._total:.0f}%  {tokens / 1e6:.1f}M tokens  "
            f"{done_bytes / seconds / 1e6:.1f} MB/s  {_duration(left)} left"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._text:
            self._draw("", end="\r")

    def _draw(self, text: str, end: str = "") -> None:
        try:
            # blanks over what the last line had more
            sys.stderr.write("\r" + text.ljust(len(self._text)) + end)
            sys.stderr.flush()
        except (OSError, ValueError):  # closed
            self._shown = False
        self._text = text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
    )
