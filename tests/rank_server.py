"""Groups of processes for tests of several ranks, forked from one that has imported everything.

A process of its own, because the tests' has threads. It takes one job after the other, as lines of
JSON, and forks a rank for each process of it: no rank spends seconds on importing torch.
"""

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from fastbrain import train
from fastbrain.training import chart


def run_rank(job: dict, folder: Path) -> int:
    """Be one rank: call the job's function, leave its result in `folder`; returns the exit code."""
    module, _, name = job["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(*job["arguments"])
    (folder / "result").write_text(json.dumps(result))
    return result if isinstance(result, int) else 0


def fork_rank(job: dict, rank: int, port: int, folder: Path) -> int:
    """Start one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for name, fd in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), fd)
        size = str(job["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
        os.environ |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), **job["environment"]}
        os.chdir(job["cwd"])
        code = run_rank(job, folder)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """Exit codes, negative for a signal, None for what had to be killed after so many seconds."""
    codes: dict[int, int | None] = {}
    ends = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > ends:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def serve(line: str) -> list[dict]:
    """Do one job; what became of each rank."""
    job = json.loads(line)
    sys.path[:0] = [each for each in job["path"] if each not in sys.path]
    with tempfile.TemporaryDirectory() as found, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        folders = [Path(found, str(rank)) for rank in range(job["ranks"])]
        for folder in folders:
            folder.mkdir()
        pids = [fork_rank(job, rank, port, folder) for rank, folder in enumerate(folders)]
        codes = wait(pids, job["seconds"])
        results = []
        for code, folder in zip(codes, folders, strict=True):
            result = folder / "result"
            results.append({
                "code": code,
                "result": json.loads(result.read_text()) if result.exists() else None,
                "out": (folder / "out").read_text(),
                "err": (folder / "err").read_text(),
            })  # fmt: skip
        return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # imported for its sake: what children do not import again
    assert train.main
    chart.draw = lambda *_: "not drawn"
    for each in sys.stdin:
        print(json.dumps(serve(each)), flush=True)
