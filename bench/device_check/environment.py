"""Where this runs: the card, its driver and clocks, and the versions of everything."""

import datetime
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import triton

from bench.machine import commit
from fastbrain.kernels.devices import runs_kernels

_ASKED = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "machine", lambda: _machine(dry)
    if not dry:
        yield "capability", _capability


def _machine(dry: bool) -> dict[str, Any]:
    usable = not dry and torch.cuda.is_available()
    machine = {
        "card": torch.cuda.get_device_name() if usable else "CPU",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    if usable:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        machine |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "memory": f"{total / 2**20:.0f} MiB, {free / 2**20:.0f} free",
            **_asked(),
        }
    line = ", ".join(f"{key} {value}" for key, value in machine.items())
    return {"machine": machine, "device": "cuda" if usable else None, "line": line}


def _capability() -> dict[str, Any]:
    assert runs_kernels(torch.device("cuda", torch.cuda.current_device())), (
        "the kernels need compute capability 8.0 (Ampere) or newer, and this card goes to the "
        "reference"
    )
    return {}


def _asked() -> dict[str, str]:
    """Driver and clocks, as nvidia-smi has them, where it is."""
    device = str(torch.cuda.get_device_properties(0).uuid)
    query = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*query, f"--id=GPU-{device}"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    names = {"driver_version": "driver"}
    return {names.get(n, n): v for n, v in zip(_ASKED, values, strict=False)}
