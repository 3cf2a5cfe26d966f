"""The crate's binary files as a stream of little-endian records, checked before they are used.

Weights and optimizer state share a layout: a magic, counts, then tensors that each say their
shape. Every length in such a file is a claim, so nothing is allocated on its word: shapes are
compared with those that the caller expects, and sizes with the file's own.
"""

import io
import os
import stat
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastbrain.atomic import StrPath, io_errors
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Io

# which file a magic belongs to, and the call that reads it
_KNOWN = {
    b"RBWTS001": "a weights file: load_bin reads it",
    b"RBOPT001": "an optimizer state: load_optimizer_state reads it",
    b"RBLOR001": "a LoRA adapter: load_lora reads it",
}
_BLOCK_BYTES = 4 << 20


class Matrix(NamedTuple):
    """A tensor that a file should hold."""

    name: str
    rows: int
    cols: int


class Reader:
    """A file read from start to end; errors are in its name. Use it as a context manager.

    Attributes:
        size: bytes in the file.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        with io_errors("read", path):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise Io(f"cannot read {self.path}: it is not a plain file")
            self._file = io.BufferedReader(io.FileIO(self.path))
            self.size = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()

    def tell(self) -> int:
        """Bytes read or passed over so far."""
        return self._file.tell()

    def seek(self, offset: int) -> None:
        """Go on at this byte."""
        with io_errors("read", self.path):
            self._file.seek(offset)

    def require(self, end: int, why: str = "") -> None:
        """Refuse the file as cut short if it ends before byte `end`."""
        if end > self.size:
            raise Io(
                f"{self.path} is cut short: it has {self.size} bytes, but "
                f"{why or f'needs at least {end}'}; copy it again, or go back to an older one"
            )

    def take(self, count: int) -> bytes:
        """The next `count` bytes, which must be there."""
        self.require(self.tell() + count)
        with io_errors("read", self.path):
            data = self._file.read(count)
        if len(data) < count:
            raise Io(f"{self.path} became shorter while it was being read")
        return data

    def magic(self, expected: bytes) -> None:
        """Take the eight bytes that say what the file is."""
        with io_errors("read", self.path):
            found = self._file.read(8)
        if not expected.startswith(found):
            what = _KNOWN.get(found)
            raise InvalidSnapshot(
                f"{self.path} begins with {found!r}, not with {expected!r}: it is "
                + (what or "another kind of file")
            )
        self.require(8)

    def numbers(self, count: int) -> tuple[int, ...]:
        """Take unsigned 64-bit integers."""
        return struct.unpack(f"<{count}Q", self.take(8 * count))

    def array(self, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """Take a matrix of numbers, row by row; the caller has checked that it is there."""
        found = np.empty(shape, dtype)
        with io_errors("read", self.path):
            count = self._file.readinto(found.data)
        if count < found.nbytes:
            raise Io(f"{self.path} became shorter while it was being read")
        return found

    def check_tensors(
        self, count: int, expected: Sequence[Matrix], payload: Callable[[int, int], int], of: str
    ) -> None:
        """Check from here to the end of the file that the tensors are those expected.

        Args:
            count: how many tensors the file says it holds.
            expected: what it should hold, in order.
            payload: bytes after a tensor's shape, from its rows and columns.
            of: what expects it, as "its configuration", for messages.

        Leaves the position where it was. Bytes past the last tensor are warned of.

        Raises:
            InvalidSnapshot: another number of tensors, or another shape; names both values.
            Io: the file ends too early.
        """
        if count != len(expected):
            raise InvalidSnapshot(wrong_count(self.path, count, len(expected), of))
        start = offset = self.tell()
        end = start + sum(16 + payload(rows, cols) for _, rows, cols in expected)
        for index, (name, rows, cols) in enumerate(expected):
            self.require(offset + 16, f"{of} implies {end}")
            self.seek(offset)
            found = self.numbers(2)
            if found != (rows, cols):
                raise InvalidSnapshot(
                    f"{self.path}: tensor {index} ({name}) is {found[0]} x {found[1]}, but {of} "
                    f"implies {rows} x {cols}; this file belongs to another architecture"
                )
            offset += 16 + payload(rows, cols)
        self.require(end, f"{of} implies {end}")
        if end < self.size:
            warnings.warn(
                f"{self.path}: the {self.size - end} bytes after the last tensor are ignored",
                stacklevel=3,
            )
        self.seek(start)

    def read_through(self) -> None:
        """Read to the end and come back, so that a bad sector shows before anything is changed."""
        start = self.tell()
        with io_errors("read", self.path):
            while self._file.read(_BLOCK_BYTES):
                pass
        self.seek(start)


def wrong_count(path: str, count: int, expected: int, of: str) -> str:
    """What to say of a file with another number of tensors than it should have."""
    return (
        f"{path} holds {count} tensors, but {of} implies {expected}; "
        "this file belongs to another architecture"
    )


def row_blocks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of rows of a few megabytes each, one row at least."""
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def require_finite(values: NDArray[Any], path: StrPath, name: str) -> None:
    """Refuse weights that are NaN or infinite, as those of a damaged file are."""
    if not np.isfinite(values).all():
        raise InvalidSnapshot(
            f"{os.fspath(path)}: {name} has values that are not finite numbers; the file is damaged"
        )


def require_exportable(tensor: Tensor, name: str) -> None:
    """Refuse to export weights that are NaN or infinite, since whoever reads them would."""
    if not bool(tensor.isfinite().all()):
        raise InvalidConfig(
            f"{name} holds values that are not finite numbers, and nothing was exported; go back "
            "to a checkpoint from before they appeared"
        )


def to_floats(tensor: Tensor) -> NDArray[Any]:
    """A tensor's values on the host as little-endian FP32, row-major; aliases them if it can."""
    host = tensor.detach().to("cpu", torch.float32).contiguous()
    return host.numpy().astype("<f4", copy=False)


def assign(view: Tensor, values: NDArray[Any]) -> None:
    """Write FP32 values into a tensor, wherever it lives, past autograd."""
    with torch.no_grad():
        view.copy_(torch.from_numpy(values.astype(np.float32, copy=False)))
