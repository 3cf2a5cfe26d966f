"""The kernels' own tests, where pytest is: on a card they run what was compiled for it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from bench.device_check.conduct import ROOT
from bench.device_check.journal import Skipped


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "tests/kernels", lambda: _tested(dry)


def _tested(dry: bool) -> dict[str, Any]:
    if find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", "not slow", "--maxfail=20"]
    command += ["tests/kernels/test_devices.py"] if dry else ["tests/kernels"]
    if find_spec("xdist") is not None and not dry:
        command += ["-n", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:] or [""]
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-500:]
    return {"summary": lines[-1], "line": lines[-1]}
