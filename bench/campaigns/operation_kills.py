"""Kills at every operation on the disk of a whole short run, and half-way through writes."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.campaigns import runs, shim
from bench.campaigns.runs import Lost

# long enough for an evaluation, a sample, a best checkpoint and a checkpoint that is deleted
OVERRIDES = ("train.max_steps=3", "eval.interval=3", "save.keep=1")

# a write is also cut in two, every so manieth of them
_HALVES = 4


def campaign(folder: Path, every: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Kill before each `every`-th operation, and in the middle of some that are writes; resume.

    Returns how many kills there were, how many runs came back to the bit, by operation, and what
    went wrong.
    """
    runs.finish(folder / "whole", *OVERRIDES)
    expected = runs.end(folder / "whole")
    names = _operations(folder)
    points = [(n, False) for n in range(0, len(names), every)]
    writes = [n for n, name in enumerate(names) if name == "write"]
    points += [(n, True) for n in writes[:: every * _HALVES]]
    killed: Counter[str] = Counter()
    failures: list[str] = []
    orphans: list[str] = []
    for n, halfway in points:
        run = folder / f"at-{n}{'-half' if halfway else ''}"
        log = run.with_suffix(".log")
        with runs.noting(failures, orphans, say):
            pid = runs.start(runs.command(run, *OVERRIDES), log, lambda n=n, h=halfway: _arm(n, h))
            code = runs.wait(pid, 60)
            if code != -9:
                raise Lost(f"{run.name}: the kill did not come, {code}{runs.tail(log)}")
            killed["half a write" if halfway else names[n]] += 1
            runs.finish(run, *OVERRIDES)
            runs.require_same(run, expected)
            shutil.rmtree(run)
    return {
        "operations": len(names),
        "kills": sum(killed.values()),
        "bit_equal": sum(killed.values()) - len(failures),
        "by_operation": dict(killed),
        "orphans": orphans,
        "failures": failures,
    }


def _operations(folder: Path) -> list[str]:
    """What operations an undisturbed run does, in order."""
    path = folder / "operations.txt"

    def arm() -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def note(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
            os.write(file, f"{name}\n".encode())
            return real(*arguments)

        shim.install(note)

    run = folder / "counted"
    pid = runs.start(runs.command(run, *OVERRIDES), run.with_suffix(".log"), arm)
    if runs.wait(pid, 60) != 0:
        raise Lost(
            f"the run whose operations are counted failed{runs.tail(run.with_suffix('.log'))}"
        )
    return path.read_text().split()


def _arm(n: int, halfway: bool) -> None:
    left = n

    def count(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        nonlocal left
        if left == 0:
            if halfway:
                fd, data = arguments
                view = memoryview(data).cast("B")
                os.write(fd, view[: len(view) // 2])
            shim.die()
        left -= 1
        return real(*arguments)

    shim.install(count)
