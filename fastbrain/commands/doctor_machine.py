"""What `fastbrain doctor` says of the machine: versions, processor, memory, threads."""

import os
import platform
from importlib import metadata
from pathlib import Path

from fastbrain.commands.doctor_check import Check, gigabytes, safely

_PACKAGES = ("fastbrain", "torch", "triton", "numpy", "safetensors", "tokenizers")
# without these nothing runs; Triton is a card's alone
_NEEDED = ("torch", "numpy", "safetensors", "tokenizers")
# what PyTorch itself, a small model and its data want at least
_LEAST_FREE = 2_000_000_000


def checks() -> list[Check]:
    """The findings."""
    rest = (("cpu", _cpu), ("cpu bf16", _cpu_bf16), ("memory", _memory), ("threads", _threads))
    return [_system(), *map(_package, _PACKAGES), *(safely(name, look) for name, look in rest)]


def _system() -> Check:
    libc = " ".join(platform.libc_ver()).strip()
    value = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    value += f", {libc}" if libc else ""
    if platform.system() != "Linux":
        return Check(
            "system", value, "warning", "Triton's kernels, and cards, need Linux (or WSL)."
        )
    return Check("system", value)


def _package(name: str) -> Check:
    try:
        return Check(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        if name in _NEEDED:
            advice = f"Nothing runs without it: `pip install {name}`."
            return Check(name, "not installed", "problem", advice)
        return Check(name, "not installed")


def _cpu() -> Check:
    return Check("cpu", f"{_cpu_name()}, {_cores()} of {os.cpu_count()} threads for this process")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _cpu_bf16() -> Check:
    from fastbrain.kernels import has_fast_bf16

    if has_fast_bf16("cpu"):
        return Check("cpu bf16", "yes")
    advice = "Mixed precision would be slower than FP32 on this CPU, which is the default on one."
    return Check("cpu bf16", "no such instructions", "ok", advice)


def _memory() -> Check:
    from fastbrain.plan.machine import machine_bytes

    total, free = machine_bytes(), _available()
    if not total:
        return Check("memory", "not known")
    value = gigabytes(total) + (f", {gigabytes(free)} free" if free is not None else "")
    if free is not None and free < _LEAST_FREE:
        advice = "Little is free: close other programs, or train something small."
        return Check("memory", value, "warning", advice)
    return Check("memory", value)


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _threads() -> Check:
    import torch

    threads, cores = torch.get_num_threads(), _cores()
    value = f"PyTorch uses {threads}"
    if threads > cores:
        advice = (
            f"More threads than the {cores} of this process wait for each other: set "
            f"OMP_NUM_THREADS={cores}."
        )
        return Check("threads", value, "warning", advice)
    busy = _load()
    if busy is not None and busy > cores / 2 and threads > 1:
        advice = (
            f"Other programs keep {busy:.1f} cores busy: a small model on the CPU may be faster "
            "with OMP_NUM_THREADS=1."
        )
        return Check("threads", value, "ok", advice)
    return Check("threads", value)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
