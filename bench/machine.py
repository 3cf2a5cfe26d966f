"""What a figure was measured on: the words that stand above every table."""

import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

from fastbrain.kernels import has_fast_bf16

_PACKAGES = ("triton", "transformers", "tokenizers", "liger-kernel")


def machine() -> dict[str, str]:
    """The card or CPU, versions, commit and date."""
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    if torch.cuda.is_available():
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = _said("nvidia-smi", *query).splitlines()[0]
    bf16 = "with" if has_fast_bf16("cpu") else "without"
    cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", platform.processor())
    found["cpu"] = f"{cpu}, {torch.get_num_threads()} threads, {bf16} BF16 instructions"
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    return found | {name: _version(name) for name in _PACKAGES}


def commit() -> str:
    """Of this checkout; "unknown" where it is none."""
    return _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
