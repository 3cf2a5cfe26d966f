"""A directory that appears under its name complete, or not at all.

It is filled beside its target, flushed and renamed. What is replaced is first renamed aside, so a
kill between the two renames leaves it whole under a name that the next writer puts back.
"""

import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from fastbrain import atomic
from fastbrain.errors import InvalidConfig

_NEW, _OLD = ".tmp-", ".old-"


def write_whole(
    out: atomic.StrPath,
    fill: Callable[[Path], object],
    *,
    known: re.Pattern[str] | None = None,
    force: bool = False,
) -> Path:
    """Make a directory of what `fill` writes into it.

    A link is followed: what it leads to is replaced.

    Args:
        out: what the directory will be called; what is above it must exist.
        fill: writes the files into the empty directory that it is given, flushing each.
        known: names of the files that a directory which may be replaced has, and no others.
        force: whether such a directory at `out` is replaced.

    Returns:
        The directory, links followed.

    Raises:
        InvalidConfig: there is something at `out` already, and it may not be replaced.
        Io: a file cannot be written; what was at `out` is there as before.
    """
    target = Path(os.path.realpath(out))
    with atomic.io_errors("write", target):
        _sweep(target)
        if os.path.lexists(target):
            _require_replaceable(target, known if force else None)
        temporary = _beside(target, _NEW)
        temporary.mkdir()
    try:
        fill(temporary)
        with atomic.io_errors("write", target):
            atomic.sync_dir(temporary)
            _move(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _move(temporary: Path, target: Path) -> None:
    if not target.exists():
        atomic.rename(temporary, target)
        atomic.sync_dir(target.parent)
        return
    old = _beside(target, _OLD)
    atomic.rename(target, old)
    try:
        atomic.rename(temporary, target)
    except BaseException:
        atomic.rename(old, target)
        raise
    atomic.sync_dir(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _require_replaceable(target: Path, known: re.Pattern[str] | None) -> None:
    if known is None:
        raise InvalidConfig(f"{target} exists already; choose another name, or say force")
    if not target.is_dir():
        raise InvalidConfig(f"{target} is not a directory; move it away, or choose another name")
    # deleting somebody's work for a slip of the hand would be worse than any refusal
    others = sorted(
        each.name for each in target.iterdir() if each.is_dir() or not known.fullmatch(each.name)
    )
    if others:
        raise InvalidConfig(
            f"{target} is not replaced, because it has {', '.join(others[:5])} in it, which would "
            "be lost: move it away yourself, or choose another name"
        )


def _sweep(target: Path) -> None:
    """Put back what a killed writer had renamed aside, and remove what it left half done."""
    for old in _left(target, _OLD):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            atomic.rename(old, target)
            atomic.sync_dir(target.parent)
    for half in _left(target, _NEW):
        shutil.rmtree(half, ignore_errors=True)


def _left(target: Path, kind: str) -> list[Path]:
    prefix = f"{kind}{target.name}-"
    found = sorted(target.parent.glob(f"{glob.escape(prefix)}*"))
    return [path for path in found if _is_dead(path.name.removeprefix(prefix).partition("-")[0])]


def _is_dead(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user
        return False
    return False


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f"{kind}{target.name}-{os.getpid()}-{secrets.token_hex(4)}")
