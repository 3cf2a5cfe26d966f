"""Compiles the kernels of every call, in several processes, so that later parts find them cached.

One after another, the kernels would take most of the budget of the checks to compile. What fails
here fails again where it is checked.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.device_check.calls import REAL, TOY, listed
from bench.device_check.conduct import ROOT
from bench.device_check.determinism import repeated

_WAIT_S = 35.0
_GIB_EACH = 2  # of the card, for the context and the tensors of a process


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "all calls", lambda: _compiled(dry)


def _compiled(dry: bool) -> dict[str, Any]:
    count = 1 if dry else _workers()
    command = [sys.executable, "-m", "bench.device_check.compiling"]
    started = [
        subprocess.Popen([*command, str(n), str(count), *["--dry"] * dry], cwd=ROOT)
        for n in range(count)
    ]
    until = time.monotonic() + _WAIT_S
    ended = [_ended(process, until) for process in started]
    bad = sum(status != 0 for status in ended)
    line = f"{count} processes" + (f", {bad} of which did not end well" if bad else "")
    return {"processes": count, "ended": ended, "line": line}


def _ended(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Its exit status; None where it took too long, which leaves more to compile later."""
    try:
        return process.wait(max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _workers() -> int:
    room = torch.cuda.mem_get_info()[0] // 2**30 // _GIB_EACH
    return int(max(1, min(8, len(os.sched_getaffinity(0)) // 2, room)))


def main() -> None:
    """Runs the calls of one of so many processes, each once."""
    number, count, *dry = sys.argv[1:]
    device = torch.device("cpu" if dry else "cuda")
    calls = [(call, kind) for call in listed(TOY if dry else REAL) for kind in call.dtypes]
    if dry:
        # one of them shows that it works
        calls = calls[-int(count) :]
    failed = False
    for call, dtype in calls[int(number) :: int(count)]:
        try:
            repeated(call, dtype, device, 1)
        except Exception:
            traceback.print_exc()
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
