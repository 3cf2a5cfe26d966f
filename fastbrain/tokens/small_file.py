"""Small files read whole, once they are known to be plain and small: others may never end."""

import stat
from pathlib import Path

from fastbrain import atomic
from fastbrain.errors import Io, Serde


def read_small(path: Path, most_bytes: int) -> bytes:
    """All bytes of a plain file of at most so many; links are followed.

    Raises:
        Io: it is missing, unreadable, or a pipe, a device or a directory.
        Serde: it is larger.
    """
    with atomic.io_errors("read", path):
        # opening a pipe would wait for someone to write into it
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Io(f"cannot read {path}: it is not a plain file")
        if found.st_size > most_bytes:
            raise Serde(f"{path} has {found.st_size} bytes, more than the {most_bytes} allowed")
        with path.open("rb") as file:
            return file.read(found.st_size)
