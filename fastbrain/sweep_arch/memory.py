"""The most memory that the steps took: of the card by two counts, or of the machine.

On the CPU it is the largest resident set of the process. Linux tells it as VmHWM, which begins anew
with every program; the same figure of getrusage begins with that of whoever started the program.
"""

import sys
from pathlib import Path
from typing import Protocol

import torch

from fastbrain.sweep_arch.place import Place

if sys.platform != "win32":
    import resource

_STATUS = Path("/proc/self/status")


class Probe(Protocol):
    """Watches memory from just before the model is built."""

    def poll(self) -> None:
        """Look now; called when a step is done."""

    def peaks(self) -> dict[str, int | None]:
        """Bytes by name; `peak_bytes` is the one to quote."""


def probe(place: Place) -> Probe:
    """One that watches this device from now on."""
    return CudaProbe(place.torch_device) if place.is_cuda else CpuProbe()


class CudaProbe:
    """What this process's allocator handed out and held, and what was in use of the whole card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = self._largest = self._in_use()

    def poll(self) -> None:
        """See how much of the card is in use, by everyone."""
        self._largest = max(self._largest, self._in_use())

    def peaks(self) -> dict[str, int | None]:
        """The allocator's peak, what it reserved, and the card's with whatever else is on it."""
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            "device_peak_bytes": self._largest,
            "device_before_model_bytes": self._before,
        }

    def _in_use(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class CpuProbe:
    """The resident set of this process, largest and before the model."""

    def __init__(self) -> None:
        self._before, self._peak_before = resident_bytes(), peak_resident_bytes()

    def poll(self) -> None:
        """Nothing to do: the system keeps the maximum."""

    def peaks(self) -> dict[str, int | None]:
        """The process's peak, and what it held before the model: interpreter and libraries."""
        return {
            "peak_bytes": peak_resident_bytes(),
            "before_model_bytes": self._before,
            "peak_before_model_bytes": self._peak_before,
        }


def peak_resident_bytes() -> int | None:
    """The largest resident set of this process so far; None where the system does not say."""
    found = _status("VmHWM")
    if found is not None or sys.platform == "win32":
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int | None:
    """The resident set of this process now; None where the system does not say."""
    return _status("VmRSS")


def _status(key: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
