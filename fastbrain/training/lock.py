"""One writer for a run: a lock on run.lock, which the system frees when its holder dies.

Readers never need it. It is a lock on the open file, not the file's being there, so that nothing
is left to clean up after a crash; the content only says who holds it.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Self

from fastbrain import atomic
from fastbrain.errors import FastBrainError
from fastbrain.parallel.launch import Launch

NAME = "run.lock"

# Windows locks bytes for readers too: one far behind the content, which stays readable
_FAR = 1 << 20


class Locked(FastBrainError):
    """Another process is writing to the run."""


class Lock:
    """The right to write to a run, held until `release` or the end of the process."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path

    @classmethod
    def acquire(cls, run: Path) -> Self:
        """Take the lock of a run's directory, which is made where it is missing.

        Raises:
            Locked: another process has it; names it.
            Io: the directory cannot be written to.
        """
        with atomic.io_errors("write to the run in", run):
            run.mkdir(parents=True, exist_ok=True)
            fd = os.open(run / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        if not _try(fd):
            os.close(fd)
            raise Locked(
                f"{run} is being trained by {_named(holder(run))}: stop that one first "
                f"(fastbrain pause {run}), or choose another place with "
                f"{Launch.find().run_option}"
            )
        content = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        with atomic.io_errors("write", run / NAME):
            os.ftruncate(fd, 0)
            os.write(fd, json.dumps(content).encode())
        return cls(fd, (run / NAME).absolute())

    def check(self) -> None:
        """Make sure that it still keeps others out.

        Raises:
            Locked: its file was removed or replaced, so that another process may write as well.
        """
        try:
            same = os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            same = False
        if not same:
            raise Locked(
                f"{self._path} was removed or replaced while this process held it, so another one "
                "may be training the run; nothing more is written"
            )

    def release(self) -> None:
        """Give it back; once is enough."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def holder(run: Path) -> dict[str, Any] | None:
    """What the newest holder wrote of itself: pid, host, started. It may be gone."""
    try:
        found = json.loads((run / NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_of_this_launch(run: Path) -> bool:
    """Whether the newest holder was a process that started where this one did, as by torchrun."""
    found = holder(run) or {}
    return (found.get("host"), found.get("parent")) == (socket.gethostname(), os.getppid())


def is_held(run: Path) -> bool:
    """Whether some process is writing to the run now."""
    try:
        fd = os.open(run / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try(fd, shared=True)
    finally:
        os.close(fd)


def _named(found: dict[str, Any] | None) -> str:
    if found is None:
        return "another process"
    return f"process {found.get('pid')} on {found.get('host')}, since {found.get('started')}"


if sys.platform == "win32":
    import msvcrt

    def _try(fd: int, shared: bool = False) -> bool:
        os.lseek(fd, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(fd, 0, os.SEEK_SET)
        return True
else:
    import fcntl

    def _try(fd: int, shared: bool = False) -> bool:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
