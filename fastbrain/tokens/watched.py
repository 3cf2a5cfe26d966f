"""A file read by position for days, which must not change under its reader.

Reads are `pread`s: unlike a memory map they answer a file that was cut short with an error instead
of a signal. Before each read the file's size, time and identity are compared with those at
opening; a difference that leaves the size and a sample of the bytes alone (a `touch`, a copy put
back) is let pass.
"""

import os
import stat
import weakref

from fastbrain import atomic
from fastbrain.errors import InvalidDataset, Io

_SAMPLE = 4096  # bytes kept of the beginning, the middle and the end


class WatchedFile:
    """A plain file, open for reading until `close` or until it is dropped.

    Attributes:
        path: absolute, so that a change of directory does not lose it.
        size: in bytes.
        sample: some bytes of the beginning, the middle and the end, each from a multiple of 4 on,
            and of 8 where the size is one.
    """

    def __init__(self, path: atomic.StrPath) -> None:
        self.path = os.path.abspath(path)
        with atomic.io_errors("open", self.path):
            self._fd = os.open(self.path, os.O_RDONLY)
            # closes a file that is dropped without close(), and without a ResourceWarning
            self._finalizer = weakref.finalize(self, os.close, self._fd)
            self._state = _state(os.stat(self.path))
            found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise InvalidDataset(f"{self.path} is not a plain file")
        self.size = found.st_size
        self.sample = self._read_sample(self._fd)

    def read(self, position: int, count: int) -> bytes:
        """`count` bytes from `position` on; InvalidDataset if they are gone or the file changed."""
        if not self._finalizer.alive:
            raise Io(f"{self.path} was closed; open it again to read from it")
        self._check_unchanged(position)
        pieces: list[bytes] = []
        while count:
            # one call may return less than it was asked for, without anything being wrong
            with atomic.io_errors("read", self.path):
                piece = os.pread(self._fd, count, position)
            if not piece:
                raise self._changed(position, "it was cut short")
            pieces.append(piece)
            position += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file; reading from it afterwards is an Io error."""
        self._finalizer()

    def _read_sample(self, fd: int) -> list[bytes]:
        last = max(self.size - _SAMPLE, 0) // 4 * 4
        with atomic.io_errors("read", self.path):
            return [os.pread(fd, _SAMPLE, at) for at in sorted({0, last // 16 * 8, last})]

    def _check_unchanged(self, position: int) -> None:
        with atomic.io_errors("read", self.path):
            try:
                now = os.stat(self.path)
            except FileNotFoundError:  # moved or deleted: what is open keeps its bytes
                return
        if _state(now) == self._state:
            return
        if now.st_size != self.size:
            raise self._changed(position, f"it now has {now.st_size}")
        with atomic.io_errors("read", self.path):
            fd = os.open(self.path, os.O_RDONLY)
        try:
            same = self._read_sample(fd) == self.sample
        finally:
            os.close(fd)
        if not same:
            raise self._changed(position, "it was overwritten or replaced")
        self._state = _state(now)

    def _changed(self, position: int, how: str) -> InvalidDataset:
        return InvalidDataset(
            f"{self.path} changed while it was being read: at byte {position}, of {self.size} when "
            f"it was opened, {how}. Put the old file back, or start anew with this one"
        )


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino
