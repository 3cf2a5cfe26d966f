"""Kills at every system call of one save: strace ends the process as it enters the call.

The run goes on from a copy of one that was killed after its third checkpoint. When the save of
step 4 opens its first file, its thread waits until strace is attached to it; the save is over when
that of step 5 begins. strace counts every kind of call by itself, so a call is named by its kind
and its number among those.
"""

import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.campaigns import runs, shim
from bench.campaigns.runs import Lost

# so that the save also deletes a checkpoint
OVERRIDES = ("train.max_steps=5", "eval.interval=5", "save.keep=1")

# the save that is killed, and the one before which it was over
_SAVE, _NEXT = ".tmp-step-4-", ".tmp-step-5-"


def unavailable() -> str | None:
    """Why this machine cannot; None when it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    words = ["strace", "-qq", "-o", os.devnull, "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace may not trace here: {done.stderr.strip()}"


def campaign(folder: Path, every: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Kill at each `every`-th system call of a save, and resume.

    Returns how many kills there were, how many runs came back to the bit, by call, and what went
    wrong.
    """
    runs.finish(folder / "whole", *OVERRIDES)
    expected = runs.end(folder / "whole")
    half = folder / "half"
    code = runs.wait(
        runs.start(runs.command(half, *OVERRIDES), folder / "half.log", _die_at_save), 60
    )
    if code != -9:
        raise Lost(
            f"{half.name} was not killed before its fourth save{runs.tail(folder / 'half.log')}"
        )
    calls = _calls(half, folder / "counted")
    killed: Counter[str] = Counter()
    failures: list[str] = []
    orphans: list[str] = []
    missed = 0
    for place in range(0, len(calls), every):
        kind, number = calls[place], calls[: place + 1].count(calls[place])
        run = folder / f"call-{place}"
        shutil.copytree(half, run)
        with runs.noting(failures, orphans, say):
            if _traced(run, f"inject={kind}:signal=KILL:when={number}"):
                # calls for memory and locks are not the same ones every time
                missed += 1
                continue
            killed[kind] += 1
            runs.finish(run)
            runs.require_same(run, expected)
            shutil.rmtree(run)
    return {
        "calls": len(calls),
        "kills": sum(killed.values()),
        "bit_equal": sum(killed.values()) - len(failures),
        "by_call": dict(killed.most_common()),
        "not_reached": missed,
        "orphans": orphans,
        "failures": failures,
    }


def _calls(half: Path, run: Path) -> list[str]:
    """The kinds of the calls of a save, in order."""
    shutil.copytree(half, run)
    if not _traced(run, "trace=all"):
        raise Lost(f"{run.name} did not come to its next save{runs.tail(run.with_suffix('.log'))}")
    text = run.with_suffix(".calls").read_text(errors="replace")
    return re.findall(r"^(?:\d+ +)?(\w+)\(", text, re.MULTILINE)


def _traced(run: Path, expression: str) -> bool:
    """Go on with a run, strace's expression in force during its save; whether that came to its end.

    Raises:
        Lost: the run ended in another way, or strace could not be attached.
    """
    log = run.with_suffix(".log")
    told, tell = os.pipe()
    gate, opened = os.pipe()
    pid = runs.start(runs.command(run), log, lambda: _arm(tell, gate, (told, opened)))
    os.close(tell)
    os.close(gate)
    try:
        thread = os.read(told, 32).decode()
        if not thread.startswith("save "):
            raise Lost(f"{run.name} did not come to its save{runs.tail(log)}")
        words = ["strace", "-o", str(run.with_suffix(".calls")), "-e", expression]
        words += ["-p", thread.split()[1]]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            if "attached" not in said:
                raise Lost(f"strace did not attach: {said.strip()}")
            os.write(opened, b"go")
            code = runs.wait(pid, 60)
            tracer.communicate(timeout=60)
        if code != -9:
            raise Lost(f"{run.name} ended with {code} instead of being killed{runs.tail(log)}")
        return os.read(told, 32) == b"over"
    finally:
        os.close(told)
        os.close(opened)


def _arm(tell: int, gate: int, not_ours: tuple[int, int]) -> None:
    # the reader must see the end of the pipe when this process dies
    for fd in not_ours:
        os.close(fd)

    def stop(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        if name == "open" and _SAVE in str(arguments[0]) and not waited:
            waited.append(True)
            os.write(tell, f"save {threading.get_native_id()}".encode())
            os.read(gate, 2)
        if _NEXT in str(arguments[0]):
            os.write(tell, b"over")
            shim.die()
        return real(*arguments)

    waited: list[bool] = []
    shim.install(stop)


def _die_at_save() -> None:
    def stop(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        if _SAVE in str(arguments[0]):
            shim.die()
        return real(*arguments)

    shim.install(stop)
