"""What a run says while it trains: rates, the time left, and one line that shows them.

Speeds and the time left come from this start of the run alone, so that a resumed run does not
divide the steps of a week by the seconds of a minute.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from shutil import get_terminal_size
from statistics import median
from typing import TextIO


class Pace:
    """How fast the steps go and when they end, measured from this start.

    Args:
        first_step: steps finished before this start.
        clock: seconds from any origin, never going back.
    """

    def __init__(self, first_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.started = clock()
        # the first step compiles and warms caches up: the time left is measured from its end
        self._origin: tuple[int, float] | None = None
        self._first_step = first_step
        self._lap = (first_step, self.started)
        self._paused = 0.0

    def elapsed_s(self) -> float:
        """Seconds since this start."""
        return self._clock() - self.started

    def since_lap_s(self) -> float:
        """Seconds since `lap` was last called."""
        return self._clock() - self._lap[1]

    def tick(self, step: int) -> None:
        """Say that `step` steps are finished."""
        if self._origin is None:
            self._origin = (step, self._clock())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do something that is not training; it counts in the time left, not in the speed."""
        before, paused = self._clock(), self._paused
        try:
            yield
        finally:
            # not added up: a pause may hold another
            self._paused = paused + self._clock() - before

    def lap(self, step: int) -> float:
        """Steps a second since the last lap, at least one step ago, pauses left out."""
        last, since = self._lap
        now = self._clock()
        taken = max(now - since - self._paused, 1e-9)
        self._lap, self._paused = (step, now), 0.0
        return (step - last) / taken

    def go_back(self, step: int) -> None:
        """Say that only `step` steps are finished after all."""
        self._first_step, self._origin = step, None
        self._lap, self._paused = (step, self._clock()), 0.0

    def remaining_s(self, step: int, total: int) -> float:
        """Seconds until `total` steps are finished, going on as since this start."""
        first, since = self._origin or (self._first_step, self.started)
        if step <= first:
            first, since = self._first_step, self.started
        return (self._clock() - since) / max(step - first, 1) * (total - step)


class Slowdown:
    """Notices when a run has become slower for good, as when something else takes the card."""

    # means over half a minute; ten in a row below this share of what was usual before
    BUCKET_S, ROW, SHARE = 30.0, 10, 0.8

    def __init__(self) -> None:
        self._means: deque[float] = deque(maxlen=200)
        self._bucket: tuple[int, list[float]] = (0, [])
        self._said = False

    def note(self, elapsed_s: float, rate: float) -> str | None:
        """Take a speed measured just now; returns a sentence once, when it has stayed low."""
        number, rates = self._bucket
        now = int(elapsed_s / self.BUCKET_S)
        if now == number:
            rates.append(rate)
            return None
        if rates:
            self._means.append(sum(rates) / len(rates))
        self._bucket = (now, [rate])
        recent, before = list(self._means)[-self.ROW :], list(self._means)[: -self.ROW]
        if len(before) < self.ROW:
            return None
        usual = median(before)
        slow = max(recent) < self.SHARE * usual
        said, self._said = self._said, slow
        if not slow or said:
            return None
        return (
            f"for {self.ROW * self.BUCKET_S / 60:.0f} minutes the speed has been at most "
            f"{short_count(max(recent))} tok/s, and was {short_count(usual)} before: does "
            "something else use the device, or does it throttle?"
        )


@dataclass(frozen=True)
class Standing:
    """Where a run stands: the numbers of its progress line, units in the names."""

    step: int
    total: int
    loss: float
    val_loss: float | None
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    used_bytes: int
    device_bytes: int | None
    skipped: int
    remaining_s: float

    def line(self, width: int | None = None, now: float | None = None) -> str:
        """The progress line; with a `width`, details are left out until it fits."""
        ends = time.strftime("%a %H:%M", time.localtime((now or time.time()) + self.remaining_s))
        memory = f"mem {self.used_bytes / 1e9:.1f}"
        memory += f"/{self.device_bytes / 1e9:.1f} GB" if self.device_bytes else " GB"
        val = f"val {self.val_loss:.3f}" if self.val_loss is not None else ""
        # each with the rank in which it goes when there is no room; 0 stays
        parts = [
            (0, f"step {self.step}/{self.total}"),
            (0, f"loss {self.loss:.3f}"),
            (5, val),
            (3, f"gnorm {self.grad_norm:.2f}"),
            (2, f"lr {short_rate(self.learning_rate)}"),
            (4, f"{short_count(self.tokens_per_s)} tok/s"),
            (1, memory),
            (6 if self.skipped else 1, f"skipped {self.skipped}"),
            (7, f"ETA {short_time(self.remaining_s)} ({ends})"),
        ]
        for dropped in range(8):
            line = "  ".join(text for rank, text in parts if text and (not rank or rank > dropped))
            if width is None or len(line) <= width:
                return line
        return line


class Console:
    """Where a run's lines go. A terminal or pipe that dies is not a reason to stop training.

    Args:
        stream: for lines.
        rank: of this process among those of the run.
    """

    def __init__(self, stream: TextIO, rank: int = 0) -> None:
        self._stream = stream
        self._name = f"fastbrain: rank {rank}: " if rank else "fastbrain: "
        self.is_terminal = stream.isatty()
        self._drawn = False

    def say(self, text: str) -> None:
        """Print whole lines."""
        self._write(("\r\x1b[K" if self._drawn else "") + text + "\n")
        self._drawn = False

    def show(self, standing: Standing) -> None:
        """Redraw the progress line on a terminal, print it anywhere else."""
        if self.is_terminal:
            self._write("\r\x1b[K" + standing.line(get_terminal_size().columns - 1))
            self._drawn = True
        else:
            self.say(standing.line())

    def complain(self, text: str) -> None:
        """Print lines to stderr, which may have died as well."""
        with suppress(OSError, ValueError, AttributeError):
            for line in text.splitlines():
                sys.stderr.write(f"{self._name}{line}\n")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        # RuntimeError: a signal's notice that falls into the middle of another line
        with suppress(OSError, ValueError, RuntimeError):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def short_rate(rate: float) -> str:
    """3.0e-4 for 0.0003."""
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def short_count(count: float) -> str:
    """41.2k for 41,200."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.0f}"


def short_time(seconds: float) -> str:
    """The two largest units: 2d 3h, 3h 12m, 4m 5s, 8s."""
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"
