"""Opening text that may be compressed, told by its first bytes and not by its name."""

import importlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastbrain import atomic
from fastbrain.errors import InvalidDataset

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BUFFER = 1 << 20
# Packed bytes unpacked at a time: few, since each may become thousands of plain ones.
_PACKED = 1 << 14


class Damaged(Exception):
    """A compressed file cannot be unpacked any further; the text says why."""


class Opened:
    """An open text file; `stream` gives its bytes, unpacked, `read_bytes()` how far along it is.

    `size` and `read_bytes()` are in bytes of the file as it lies on the disk.
    """

    def __init__(self, raw: io.FileIO, stream: "io.BufferedReader[Any]") -> None:
        self.stream = stream
        self.size = os.fstat(raw.fileno()).st_size
        self.read_bytes: Callable[[], int] = raw.tell


@contextmanager
def opened(path: atomic.StrPath) -> Iterator[Opened]:
    """Open `path` for reading bytes, through gzip or zstd if it begins as such a file does.

    Raises Io for a file that cannot be read and InvalidDataset for a zstd file without the
    package for it; reading from the stream raises Damaged for an archive that is broken or cut.
    """
    with atomic.io_errors("read", path):
        raw = io.FileIO(path)
    with raw:
        with atomic.io_errors("read", path):
            start = raw.read(4)
            raw.seek(0)
        inner: io.RawIOBase = raw
        if start.startswith(_GZIP):
            inner = _Unpacked(raw, lambda: zlib.decompressobj(wbits=31), zlib.error)
        elif start == _ZSTD:
            inner = _zstd(raw, path)
        with io.BufferedReader(inner, _BUFFER) as stream:
            yield Opened(raw, stream)


def _zstd(raw: io.FileIO, path: atomic.StrPath) -> "_Unpacked":
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise InvalidDataset(
            f"{os.fspath(path)} is compressed with zstd, which needs a package that is not "
            "installed: `pip install zstandard`, or unpack the file with `unzstd` first"
        ) from error
    # its decompressobj, since its readers take a file that was cut short for one that ended
    return _Unpacked(raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)


class _Unpacked(io.RawIOBase):
    """The plain bytes of a file of one or more compressed parts, one after another."""

    def __init__(self, raw: io.FileIO, begin: Callable[[], Any], broken: type[Exception]) -> None:
        self._raw = raw
        self._begin = begin
        self._broken = broken
        self._part = begin()
        self._plain = memoryview(b"")
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._plain:
            if not self._unpack_some():
                return 0
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._plain))
        view[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _unpack_some(self) -> bool:
        """Unpack a little more, if only to nothing; False at the end of the file."""
        packed = self._packed or self._raw.read(_PACKED)
        if not packed:
            if not self._part.eof:
                raise Damaged("the archive was cut short")
            return False
        if self._part.eof:
            packed = packed.lstrip(b"\0")  # some tools pad an archive with zeros
            self._part = self._begin() if packed else self._part
        try:
            self._plain = memoryview(self._part.decompress(packed) if packed else b"")
        except self._broken as error:
            raise Damaged(f"the archive is broken ({error})") from error
        self._packed = self._part.unused_data if packed else b""
        return True
