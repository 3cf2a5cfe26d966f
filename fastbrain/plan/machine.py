"""What this machine reaches, measured: products in both precisions, copies, memory."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

# imported when something is measured: plans for named cards are made without it
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Measured:
    """A device and its rates.

    Attributes:
        name: as PyTorch has it.
        units: multiprocessors, or threads.
        bf16_flops: operations per second of a large product of BF16 operands.
        fp32_flops: the same of FP32 operands.
        bytes_per_s: of a large copy, read and written bytes together.
        memory_bytes: that there are.
    """

    name: str
    units: int
    bf16_flops: float
    fp32_flops: float
    bytes_per_s: float
    memory_bytes: int


def cuda_name() -> str | None:
    """The first CUDA device's name, or None where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def measured_cuda() -> Measured:
    """The first CUDA device."""
    import torch

    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    return Measured(
        properties.name,
        properties.multi_processor_count,
        _flops(device, torch.bfloat16, 4096),
        _flops(device, torch.float32, 2048),
        _bandwidth(device, 2**28),
        properties.total_memory,
    )


def measured_cpu() -> Measured:
    """The CPU, with as many threads as PyTorch uses now."""
    import torch

    device, threads = torch.device("cpu"), torch.get_num_threads()
    return Measured(
        f"this CPU, {threads} thread{'s' if threads > 1 else ''}",
        threads,
        # where PyTorch would have to emulate it, the package widens instead
        max(_flops(device, torch.bfloat16, 256), _widened_flops(device, 1024)),
        _flops(device, torch.float32, 1024),
        _bandwidth(device, 2**26),
        machine_bytes(),
    )


def machine_bytes() -> int:
    """The machine's memory; 0 where there is no way to ask."""
    if sys.platform == "win32":
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _flops(device: "torch.device", dtype: "torch.dtype", size: int) -> float:
    import torch

    a = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / _seconds(lambda: a @ a, device)


def _widened_flops(device: "torch.device", size: int) -> float:
    import torch

    a = torch.randn(size, size, device=device).bfloat16()
    return 2.0 * size**3 / _seconds(lambda: (a.float() @ a.float()).bfloat16(), device)


def _bandwidth(device: "torch.device", size: int) -> float:
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / _seconds(lambda: target.copy_(source), device)


def _seconds(run: Callable[[], object], device: "torch.device") -> float:
    """The median of as many runs as fit into a fifth of a second, three at least."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed()
    first = timed()
    times = sorted(timed() for _ in range(max(3, min(20, int(0.2 / first)))))
    return times[len(times) // 2]
