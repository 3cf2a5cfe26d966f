"""What `fastbrain doctor` says of the disk a run would lie on: its kind, its speed, its room."""

import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from fastbrain import atomic
from fastbrain.commands.doctor_check import Check, gigabytes
from fastbrain.errors import FastBrainError, InvalidConfig
from fastbrain.training.lock import Lock, Locked

_WRITTEN = 256 << 20
_BLOCK = 1 << 20
_FSYNCS = 16
# a checkpoint of the smallest shipped models, twice
_LEAST_FREE = 1_000_000_000
_SLOW = 50e6  # bytes a second: a checkpoint of 100M parameters takes half a minute
_SLOW_FSYNC = 0.1

_REMOTE = {
    "9p": "a Windows drive mounted in WSL",
    "drvfs": "a Windows drive mounted in WSL",
    "cifs": "a network drive",
    "smb3": "a network drive",
    "smbfs": "a network drive",
    "nfs": "a network drive",
    "nfs4": "a network drive",
    "sshfs": "a network drive",
    "fuse": "a file system outside of the kernel, as cloud drives are",
    "fuseblk": "a Windows disk",
    "ntfs": "a Windows disk",
    "ntfs3": "a Windows disk",
    "vfat": "a disk without a journal",
    "exfat": "a disk without a journal",
    "virtiofs": "a folder that the host shares",
    "vboxsf": "a folder that the host shares",
}
_ELSEWHERE = (
    "there a rename may not be atomic, or not survive a power loss: keep runs on a local Linux "
    "file system (ext4, xfs, btrfs), and copy finished checkpoints here."
)


def checks(folder: Path) -> list[Check]:
    """The findings; what is written to `folder` for them is removed.

    Raises:
        InvalidConfig: there is no such directory.
    """
    if not folder.is_dir():
        raise InvalidConfig(f"there is no directory {folder}")
    found = [_file_system(folder), _room(folder)]
    try:
        with tempfile.TemporaryDirectory(prefix=".fastbrain-doctor-", dir=folder) as inside:
            found += [*_speed(Path(inside)), _rename(Path(inside)), _lock(Path(inside))]
    except OSError as error:
        reason = error.strerror or str(error)
        advice = f"Runs cannot be kept here: {reason}. Choose another directory."
        found.append(Check("writing", "fails", "problem", advice))
    return found


def _file_system(folder: Path) -> Check:
    kind, point = mounted(folder)
    value = f"{folder.resolve()} on {kind} (mounted at {point})" if kind else str(folder.resolve())
    base = kind.partition(".")[0]
    if base in _REMOTE:
        return Check("file system", value, "warning", f"This is {_REMOTE[base]}; {_ELSEWHERE}")
    if kind in ("tmpfs", "ramfs"):
        return Check("file system", value, "warning", "This is memory: it is gone after a restart.")
    return Check("file system", value)


def mounted(folder: Path, table: Path = Path("/proc/self/mountinfo")) -> tuple[str, str]:
    """Kind and mount point of the file system of `folder`; empty where nothing tells."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return "", ""
    place, found = folder.resolve(), ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        point = _unescaped(fields[4])
        # of two at one place the later covers the earlier
        if place.is_relative_to(point) and len(point) >= len(found[1]):
            found = (kind[0], point)
    return found


def _unescaped(text: str) -> str:
    for code, meant in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(code, meant)
    return text


def _room(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    value = f"{gigabytes(free)} free"
    if free < _LEAST_FREE:
        advice = "Two checkpoints of even a small model may not fit: free some, or go elsewhere."
        return Check("free space", value, "problem" if free < _BLOCK else "warning", advice)
    return Check("free space", value)


def _speed(folder: Path) -> list[Check]:
    size = min(_WRITTEN, shutil.disk_usage(folder).free // 4) // _BLOCK * _BLOCK
    path = folder / "speed"
    block = secrets.token_bytes(_BLOCK)  # a disk that compresses would only pretend to be fast
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    wrote = time.perf_counter() - begin
    read = _read(path)
    path.unlink()
    found = [_rate("disk write", size, wrote, "with fsync"), _rate("disk read", size, *read)]
    latency = statistics.median(_fsync_seconds(folder, _FSYNCS))
    value = f"{1000 * latency:.1f} ms"
    if latency > _SLOW_FSYNC:
        advice = "Each save waits for several of these: choose a faster disk."
        return [*found, Check("fsync", value, "warning", advice)]
    return [*found, Check("fsync", value)]


def _read(path: Path) -> tuple[float, str]:
    """Seconds to read the file back, and from where."""
    how = "from memory: it cannot be emptied here"
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            how = "read back"
        begin = time.perf_counter()
        while file.read(_BLOCK):
            pass
        return time.perf_counter() - begin, how


def _rate(name: str, size: int, seconds: float, how: str) -> Check:
    rate = size / max(seconds, 1e-9)
    value = f"{rate / 1e6:,.0f} MB/s ({size >> 20} MB, {how})"
    if size and rate < _SLOW:
        advice = "Saving will take long here: save less often, or choose a faster disk."
        return Check(name, value, "warning", advice)
    return Check(name, value)


def _fsync_seconds(folder: Path, count: int) -> Iterable[float]:
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(count):
            begin = time.perf_counter()
            file.write(b"x" * 512)
            os.fsync(file.fileno())
            yield time.perf_counter() - begin


def _rename(folder: Path) -> Check:
    """What a checkpoint does: a directory is filled, flushed, renamed, and the name is flushed."""
    begin = time.perf_counter()
    try:
        (folder / "half").mkdir()
        atomic.write_new(folder / "half" / "file", [b"whole"])
        atomic.sync_dir(folder / "half")
        atomic.rename(folder / "half", folder / "step")
        atomic.sync_dir(folder)
        same = (folder / "step" / "file").read_bytes() == b"whole"
    except (OSError, FastBrainError) as error:
        advice = f"Checkpoints are made this way, and it fails here: {error}"
        return Check("rename", "fails", "problem", advice)
    if not same:
        return Check("rename", "loses bytes", "problem", "Choose another directory.")
    milliseconds = 1000 * (time.perf_counter() - begin)
    return Check("rename", f"{milliseconds:.1f} ms for a directory, name flushed")


def _lock(folder: Path) -> Check:
    advice = "Two processes could train one run at once without noticing: choose another disk."
    try:
        held = Lock.acquire(folder)
        try:
            Lock.acquire(folder).release()
        except Locked:
            return Check("locks", "work")
        finally:
            held.release()
    except (OSError, FastBrainError) as error:
        return Check("locks", "fail", "problem", f"A run has to lock its directory: {error}")
    return Check("locks", "do not keep others out", "warning", advice)
