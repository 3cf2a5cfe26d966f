"""The device that is measured: its name, when its work is done, and the memory that it has."""

import importlib.metadata
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fastbrain.errors import UnsupportedCuda
from fastbrain.plan.machine import machine_bytes


@dataclass(frozen=True)
class Place:
    """A CUDA card or the CPU.

    Attributes:
        torch_device: as PyTorch has it.
        name: of the product.
        total_bytes: its memory; None where the system does not say.
        uuid: a card's identity, as its driver writes it.
    """

    torch_device: torch.device
    name: str
    total_bytes: int | None
    uuid: str | None = None

    @classmethod
    def find(cls, wanted: str | None) -> Self:
        """The device that "cpu", "cuda" or "cuda:N" names; None is the first card, or the CPU.

        Raises:
            UnsupportedCuda: there is no such card.
        """
        if wanted is None:
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(wanted)
        if device.type == "cpu":
            return cls(device, _cpu_name(), machine_bytes() or None)
        index, cards = device.index or 0, torch.cuda.device_count()
        if index >= cards:
            have = f"cards 0 to {cards - 1} are there" if cards else "there is none"
            raise UnsupportedCuda(
                f"--device is {wanted}, and {have}: choose another, pass --device cpu, or check "
                "the driver and that PyTorch is a CUDA build"
            )
        properties = torch.cuda.get_device_properties(index)
        return cls(
            torch.device("cuda", index),
            properties.name,
            properties.total_memory,
            f"GPU-{properties.uuid}",
        )

    @property
    def is_cuda(self) -> bool:
        """Whether it is a card."""
        return self.torch_device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything asked for is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def facts(self) -> dict[str, Any]:
        """What a figure has to be quoted with."""
        threads = None if self.is_cuda else torch.get_num_threads()
        return {
            "device": str(self.torch_device),
            "name": self.name,
            "total_bytes": self.total_bytes,
            "threads": threads,
        }


def versions() -> dict[str, str | None]:
    """Of the software that the figures depend on."""
    return {
        "fastbrain": _installed("fastbrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }


def _installed(package: str) -> str | None:
    # a checkout has no version, and there is no Triton for every platform
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
