"""Whether the figures are those of a free card at full speed, as far as its driver says.

It asks through nvidia-ml-py, the `pynvml` module, where that is installed.
"""

import importlib
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

# below this share of its boost clock a card is slowed by something
_FULL_CLOCK = 0.95

# above this share of time a card was busy before the first step
_IDLE_PERCENT = 5

_SAMPLE_S = 0.02


class Watch:
    """What one card does beside the measurement.

    Make it before this process uses CUDA: whoever is on a card then is somebody else, even where
    the driver knows processes by other numbers than this one does, as it does in a container.

    Args:
        nvml: the module to ask; `pynvml`, unless given.

    Attributes:
        unchecked: why there is nothing to say, if there is not.
    """

    def __init__(self, nvml: ModuleType | Any | None = None) -> None:
        self.unchecked: str | None = None
        self._others: set[int] = set()
        self._busy_percent = 0
        self._clocks: list[int] = []
        self._max_clock = 0
        self._driver: str | None = None
        self._handle: Any = None
        self._cards: dict[str, tuple[Any, set[int], int]] = {}
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError:
            self.unchecked = "nvidia-ml-py is not installed"
            return
        with self._asking():
            self._nvml.nvmlInit()
            self._driver = _text(self._nvml.nvmlSystemGetDriverVersion())
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
                self._cards[uuid] = handle, self._processes(handle), self._busy(handle)

    def attach(self, uuid: str | None) -> None:
        """Say which card is used; `uuid` as the driver writes it."""
        if self.unchecked is not None:
            return
        if uuid not in self._cards:
            self.unchecked = f"the driver lists no card {uuid}"
            return
        self._handle, self._others, self._busy_percent = self._cards[uuid]
        with self._asking():
            self._max_clock = self._nvml.nvmlDeviceGetMaxClockInfo(
                self._handle, self._nvml.NVML_CLOCK_SM
            )

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Read the clock during the block, and look around once more at its end."""
        if self.unchecked is not None:
            yield
            return
        done = threading.Event()
        reader = threading.Thread(target=self._read_clock, args=(done,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            done.set()
            reader.join()
        with self._asking():
            self._note_newcomers()

    def warnings(self, boost_mhz: float | None) -> list[str]:
        """What speaks against the figures; `boost_mhz` is None for the card's own maximum."""
        if self.unchecked is not None:
            return [
                f"whether something else uses the GPU, or slows it, was not checked: "
                f"{self.unchecked}"
            ]
        found = []
        if self._others:
            count = len(self._others)
            who = "another process uses" if count == 1 else f"{count} other processes use"
            found.append(f"{who} this GPU, so these figures are not those of a free card")
        elif self._busy_percent > _IDLE_PERCENT:
            found.append(
                f"the GPU was {self._busy_percent}% busy before the first step, so something else "
                "uses it, and these figures are not those of a free card"
            )
        boost, clock = boost_mhz or self._max_clock, self._clock()
        if clock is not None and clock < _FULL_CLOCK * boost:
            found.append(
                f"the SM clock was {clock:.0f} MHz during the timed steps, and the boost clock is "
                f"{boost:.0f} MHz: heat or a power limit slows the card "
                "(nvidia-smi -q -d CLOCK,PERFORMANCE says which)"
            )
        return found

    def facts(self) -> dict[str, Any]:
        """The same as numbers."""
        return {
            "unchecked": self.unchecked,
            "driver": self._driver,
            "other_processes": len(self._others),
            "busy_before_percent": self._busy_percent,
            "sm_clock_mhz": self._clock(),
            "max_sm_clock_mhz": self._max_clock or None,
        }

    def _clock(self) -> float | None:
        return statistics.median(self._clocks) if self._clocks else None

    def _read_clock(self, done: threading.Event) -> None:
        with self._asking():
            while not done.wait(_SAMPLE_S):
                clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
                self._clocks.append(clock)

    def _note_newcomers(self) -> None:
        here = self._processes(self._handle)
        new = here - self._others
        if os.getpid() in new:
            new.remove(os.getpid())
        elif new:
            # one of them is this process, under another number
            new.pop()
        self._others |= new

    def _processes(self, handle: Any) -> set[int]:
        return {p.pid for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}

    def _busy(self, handle: Any) -> int:
        # a slice of a card has no such figure
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return 0

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            self.unchecked = str(error)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
