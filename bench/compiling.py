"""Peers under `torch.compile`, and whether this process times anything at all."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch


def interpreted() -> bool:
    """Whether Triton's interpreter is on: then everything runs once, and nothing is timed."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def compiled(function: Callable[..., Any]) -> Any:
    """`torch.compile` of a function in one piece."""
    return torch.compile(function, fullgraph=True, **compiling())


def compiling(mode: str | None = None) -> dict[str, Any]:
    """Options of `torch.compile`; where nothing is timed it traces, and makes no code."""
    how = {"backend": "aot_eager"} if interpreted() else {"mode": mode}
    return {"dynamic": False, **how}


def compiler_missing(device: torch.device) -> str | None:
    """Why `torch.compile` makes no code for this device, or None."""
    if interpreted() or device.type != "cpu":
        return None
    if os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++"):
        return None
    return "torch.compile needs a C++ compiler for the CPU; install g++"
