"""Whether a disk has room, asked before it is needed."""

import errno
import shutil
from pathlib import Path

from fastbrain.errors import Io


def require_space(path: Path, need: int, what: str) -> None:
    """Refuse to begin writing `need` bytes at `path` where they cannot end.

    Args:
        path: it, or the nearest directory above it that exists, tells which disk.
        need: bytes.
        what: begins the sentence, as in "a checkpoint needs".

    Raises:
        Io: there is less free space.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if need <= free:
        return
    error = Io(
        f"{what} {_size(need)}, and the disk of {there} has {_size(free)} free: free some space, "
        "or put the run on another disk"
    )
    error.errno = errno.ENOSPC
    raise error


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
