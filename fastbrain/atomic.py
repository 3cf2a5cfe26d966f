"""Durable writing: a file appears under its name complete, or not at all. Knows no format.

Every write goes beside its target, is flushed to the disk, and is renamed over the target; then
the directory is flushed, so that the new name survives a power loss as well. The five functions
that change the disk (`open`, `write`, `fsync`, `rename`, `sync_dir`) are module-level and looked
up at each call, so that a test can replace them by ones that fail, record, or kill at operation N.
They raise plain OSErrors; everything else here raises `errors.Io`.
"""

import errno
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from fastbrain.errors import Io

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

StrPath = str | os.PathLike[str]

# what to do about it, by the number of the error
_WAY_OUT = {
    errno.ENOSPC: "free some space on that disk, or choose a path on another one",
    errno.EDQUOT: "your quota there is used up: delete something, or choose another disk",
    errno.EFBIG: "the file would pass the largest size allowed (see `ulimit -f`)",
    errno.EROFS: "choose a path on a disk that is not mounted read-only",
    errno.EACCES: "check the permissions of the file and of its directory",
    errno.EPERM: "check the permissions of the file and of its directory",
    errno.ENOENT: "check the path; directories are not created",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EISDIR: "give the path of a file, not of a directory",
    errno.EIO: "the device itself failed: check it (`dmesg`), and choose another disk",
    errno.EMFILE: "this process has too many files open (see `ulimit -n`)",
}


def open(path: StrPath) -> int:
    """Create a file that must not exist yet, with the mode of the umask; returns a descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


def write(fd: int, data: "ReadableBuffer") -> int:
    """Write some of `data`; returns how many bytes."""
    return os.write(fd, data)


def fsync(fd: int) -> None:
    """Force a file's bytes to the disk."""
    os.fsync(fd)


def rename(source: StrPath, target: StrPath) -> None:
    """Move a file or directory over a name in the same file system, in one step."""
    os.replace(source, target)


def sync_dir(path: StrPath) -> None:
    """Force a directory's names to the disk, where the system has such a call."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # some network file systems have no such call; there is nothing better to do on them
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextmanager
def io_errors(action: str, path: StrPath) -> Iterator[None]:
    """Turn an OSError of the block into an Io, "cannot <action> <path>: why; what to do"."""
    try:
        yield
    except Io:
        raise
    except OSError as error:
        raise _io(action, path, error) from error


def _io(action: str, path: StrPath, error: OSError) -> Io:
    reason = error.strerror or str(error)
    way_out = _WAY_OUT.get(error.errno or 0)
    found = Io(f"cannot {action} {os.fspath(path)}: {reason}" + (f"; {way_out}" if way_out else ""))
    # set afterwards: an OSError made from a number and a text prints "[Errno 28] ..."
    found.errno = error.errno
    return found


class _Sink(io.RawIOBase):
    """The raw end of the file that `replacing` hands out: every byte goes through `write`."""

    def __init__(self, fd: int, target: Path) -> None:
        self._fd = fd
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer") -> int:
        if self._fd < 0:  # given up: what was still buffered has nowhere to go
            return memoryview(data).nbytes
        with io_errors("write", self._target):
            return write(self._fd, data)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def replacing(path: StrPath) -> Iterator[BinaryIO]:
    """Hand out a binary file that becomes `path` when the block ends well.

    The bytes go to `.tmp-<name>-<pid>-<nonce>` in the same directory. If the block raises, that
    file is removed and the target is as it was. A link is followed: the file that it leads to is
    replaced. What exists and is not a plain file is refused before anything is written. The file
    is for writing from start to end; it cannot seek.
    """
    target = _target(path)
    temporary = _beside(target)
    with io_errors("write", target):
        fd = open(temporary)
    sink = _Sink(fd, target)
    file = io.BufferedWriter(sink, 1 << 20)
    try:
        yield file
        file.flush()
        with io_errors("write", target):
            fsync(fd)
            sink.release()
        _move(temporary, target)
    except BaseException:
        with suppress(OSError):
            sink.release()
        _remove(temporary)
        raise
    finally:
        file.close()


class Written(NamedTuple):
    """What `write_new` left on the disk: the file's size and the SHA-256 of its bytes, in hex."""

    bytes: int
    sha256: str


def write_new(path: StrPath, pieces: Iterable["ReadableBuffer"]) -> Written:
    """Write a file that must not exist yet, flush it, and hash it on the way.

    For a file inside a directory that gets its name later: one that is left half written by an
    error stays, and goes with its directory.

    Raises:
        Io: the file exists already, or cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with io_errors("write", path):
        fd = open(path)
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                digest.update(view)
                size += view.nbytes
                while view.nbytes:
                    view = view[write(fd, view) :]
            fsync(fd)
        finally:
            os.close(fd)
    return Written(size, digest.hexdigest())


def write_bytes(path: StrPath, data: "ReadableBuffer") -> None:
    """Replace `path` by a file of these bytes, durably."""
    with replacing(path) as file:
        file.write(data)


def sha256_of(path: StrPath) -> str:
    """The SHA-256 of a file's bytes, in hex; reads it in pieces."""
    with io_errors("read", path), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _target(path: StrPath) -> Path:
    target = Path(os.path.realpath(path))
    with io_errors("write", target):
        try:
            kind = target.stat().st_mode
        except FileNotFoundError:
            return target
    if not stat.S_ISREG(kind):
        raise Io(f"cannot write {target}: it exists and is not a plain file; choose another path")
    return target


def _beside(target: Path) -> Path:
    return target.with_name(f".tmp-{target.name}-{os.getpid()}-{secrets.token_hex(4)}")


def _move(temporary: Path, target: Path) -> None:
    with io_errors("write", target):
        rename(temporary, target)
        sync_dir(target.parent)


def _remove(temporary: Path) -> None:
    # the error that brought us here matters more than one from cleaning up
    with suppress(OSError):
        temporary.unlink()
