"""Runs one part under a budget, in a process, or in several where the GPU is lost on the way."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.device_check.child import AGAIN
from bench.device_check.journal import Journal
from bench.device_check.parts import Part

ROOT = Path(__file__).parents[2]
PROCESSES = 6  # that a part may use up


def run(part: Part, limit_s: float, dry: bool) -> dict[str, Any]:
    """What a part found within `limit_s` seconds, as a result file has it.

    A process that dies, or asks for another one, is followed by one that skips the cases it had;
    the case in which it died has failed.
    """
    begun = time.time()
    until = begun + limit_s
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder, "journal.json"), Path(folder, "stderr")
        for _ in range(PROCESSES):
            status = _process(part, path, errors, until, dry)
            journal = Journal(path)
            if journal.done:
                break
            if status is None:
                case = f" in {journal.running!r}" if journal.running else ""
                result["error"] = f"killed{case}, after the {limit_s:.0f} s it had"
                break
            reason = _reason(status, errors)
            if journal.running is not None:
                print(f"  FAILED {journal.running}: {reason.splitlines()[0]}", flush=True)
                journal.end({"failed": reason})
            elif status != AGAIN:
                result["error"] = reason
                break
        else:
            result["error"] = f"used up {PROCESSES} processes"
    failed = any("failed" in case for case in journal.cases.values())
    if failed or (not journal.done and status is not None):
        result["status"] = "failed"
    elif journal.left_out is not None or not journal.done:
        result["status"] = "over budget"
    else:
        result["status"] = "passed"
    if journal.left_out is not None:
        result["left_out"] = journal.left_out
    seconds = {"seconds": round(time.time() - begun, 1), "budget_s": round(limit_s)}
    return result | seconds | {"cases": journal.cases}


def _process(part: Part, path: Path, errors: Path, until: float, dry: bool) -> int | None:
    """Exit status of one process of a part; None of one that had to be killed."""
    command = [sys.executable, "-m", f"{__package__}.child", part.module, str(path), str(until)]
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, *["--dry"] * dry],
            cwd=ROOT,
            env=_environment(dry),
            stderr=stderr,
            start_new_session=True,
        )
        try:
            return process.wait(max(until - time.time(), 0.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _environment(dry: bool) -> dict[str, str]:
    variables = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    # a crash of native code says where
    variables["PYTHONFAULTHANDLER"] = "1"
    if dry:
        # read when a kernel is decorated, so before anything of fastbrain is imported
        variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables.setdefault("OMP_NUM_THREADS", "1")
    return variables


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started, some of which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # one that waits inside of a driver may take its time, and nobody waits for it
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _reason(status: int, errors: Path) -> str:
    """Why a process ended, and what it last wrote to its error output."""
    name = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    return f"the process ended with {name}\n{errors.read_text(errors='replace')[-4000:]}".strip()
