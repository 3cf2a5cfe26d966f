"""The checkpoints of a run as they lie there: those that count, and those that were put aside."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fastbrain.errors import InvalidSnapshot
from fastbrain.training import manifest
from fastbrain.training.run_dir import RunDir

_NAME = re.compile(r"step-(\d{8,18})(?:\.[0-9a-f]+)?(?:\.(corrupt|superseded))?")

# the digest of one file keeps one core busy; the disk, or the other core, takes a second
_AT_ONCE = 2


class Kept(NamedTuple):
    """A checkpoint's directory.

    Attributes:
        step, path: what it is of, and where.
        bytes: of its files.
        aside: `corrupt` or `superseded` where it was put aside, else None.
        fault: why it is not valid, "" when it is; None when nobody looked.
    """

    step: int
    path: Path
    bytes: int
    aside: str | None
    fault: str | None


def kept(run: RunDir, verify: bool) -> list[Kept]:
    """Every checkpoint that is there, oldest step first; those that vanish meanwhile are not.

    Args:
        run: the run.
        verify: read every byte of those that count, and compare.
    """
    try:
        paths = sorted((run.path / "checkpoints").iterdir())
    except OSError:
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in paths]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        looked = pool.map(
            lambda each: _look(run, int(each[0][1]), each[0][2], each[1], verify),
            [(name, path) for name, path in named if name],
        )
        found = [each for each in looked if each.path.is_dir()]
    return sorted(found, key=lambda each: (each.step, each.aside is not None, each.path.name))


def _look(run: RunDir, step: int, aside: str | None, path: Path, verify: bool) -> Kept:
    total = 0
    with suppress(OSError):
        for file in path.iterdir():
            with suppress(OSError):
                total += file.stat().st_size
    if aside or not verify:
        return Kept(step, path, total, aside, None)
    try:
        return Kept(step, path, total, None, manifest.fault(path, run.run_id, step) or "")
    except InvalidSnapshot as error:
        return Kept(step, path, total, None, str(error))
