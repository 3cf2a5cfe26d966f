"""A file is there whole or not at all, whatever fails on the way."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from fastbrain import atomic
from fastbrain.errors import Io

PRIMITIVES = ["open", "write", "fsync", "rename", "sync_dir"]


def by_file(path: Path, data: bytes) -> None:
    with atomic.replacing(path) as file:
        file.write(data)


def anew(path: Path, data: bytes) -> None:
    """In a directory that has its name only later, as the files of a checkpoint are."""
    path.unlink(missing_ok=True)
    assert atomic.write_new(path, [data[:5], data[5:]]) == (
        len(data), hashlib.sha256(data).hexdigest(),
    )  # fmt: skip


both = pytest.mark.parametrize("put", [by_file, atomic.write_bytes])


@both
def test_a_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path, put):
    target = tmp_path / "model.rbw"
    target.write_bytes(b"old and longer")
    put(target, b"new")
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["model.rbw"]


@pytest.mark.parametrize("put", [by_file, anew])
def test_the_mode_comes_from_the_umask(tmp_path, put):
    before = os.umask(0o027)
    try:
        put(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_block_that_raises_changes_nothing(tmp_path):
    target = tmp_path / "model.rbw"
    target.write_bytes(b"old")

    def interrupted():
        with atomic.replacing(target) as handed:
            handed.write(b"half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.rbw"]


@pytest.mark.parametrize("primitive", PRIMITIVES)
@both
def test_a_failing_operation_is_told_and_leaves_a_whole_file(tmp_path, monkeypatch, put, primitive):
    target = tmp_path / "model.rbw"
    target.write_bytes(b"old")

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic, primitive, fail)
    with pytest.raises(Io) as caught:
        put(target, b"new")
    assert str(caught.value) == (
        f"cannot write {target}: No space left on device; "
        "free some space on that disk, or choose a path on another one"
    )
    assert caught.value.errno == errno.ENOSPC
    # once renamed, the new file is whole: only its survival of a power loss is in doubt
    assert target.read_bytes() == (b"new" if primitive == "sync_dir" else b"old")
    assert os.listdir(tmp_path) == ["model.rbw"]


@both
def test_before_every_operation_the_target_is_the_old_file_or_the_new(tmp_path, monkeypatch, put):
    target = tmp_path / "model.rbw"
    target.write_bytes(b"old")
    data = bytes(range(256)) * 10_000  # passes the buffer twice
    order, seen = [], []

    def watched(name, primitive):
        def call(*args):
            order.append(name)
            seen.append(target.read_bytes())
            return primitive(*args)

        return call

    for name in PRIMITIVES:
        monkeypatch.setattr(atomic, name, watched(name, getattr(atomic, name)))
    put(target, data)
    assert [name for i, name in enumerate(order) if name not in order[:i]] == PRIMITIVES
    assert set(seen) == {b"old", data}
    assert seen.index(data) == order.index("sync_dir")


@pytest.mark.parametrize("put", [by_file, anew])
def test_a_short_write_is_carried_on(tmp_path, monkeypatch, put):
    monkeypatch.setattr(atomic, "write", lambda fd, data: os.write(fd, data[:7]))
    data = os.urandom(3_000)
    put(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    link.symlink_to(real)
    by_file(link, b"first")
    by_file(link, b"second")
    assert link.is_symlink()
    assert real.read_bytes() == b"second"


@both
def test_what_is_not_a_plain_file_is_refused_before_anything_is_written(tmp_path, put):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(Io, match=f"cannot write {path}: it exists and is not a plain file"):
            put(path, b"x")
    assert os.listdir(tmp_path) == ["pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@both
def test_a_missing_directory_is_named(tmp_path, put):
    path = tmp_path / "nowhere" / "model.rbw"
    with pytest.raises(Io, match=f"cannot write {path}: No such file or directory; check the path"):
        put(path, b"x")


def test_a_temporary_says_whose_it_is(tmp_path):
    with atomic.replacing(tmp_path / "a.rbw"), atomic.replacing(tmp_path / "a.rbw"):
        names = os.listdir(tmp_path)
        assert len(names) == 2  # two writers of one name do not share a temporary
        assert all(name.startswith(f".tmp-a.rbw-{os.getpid()}-") for name in names)
    assert os.listdir(tmp_path) == ["a.rbw"]


def test_a_file_system_without_directory_flushes_is_accepted(tmp_path, monkeypatch):
    def no_such_call(fd):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", no_such_call)
    atomic.sync_dir(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        atomic.fsync(0)


def test_the_checksum_is_that_of_the_bytes(tmp_path):
    data = os.urandom(300_000)
    (tmp_path / "file").write_bytes(data)
    assert atomic.sha256_of(tmp_path / "file") == hashlib.sha256(data).hexdigest()
    missing = tmp_path / "missing"
    with pytest.raises(Io, match=f"cannot read {missing}: No such file or directory"):
        atomic.sha256_of(missing)


@pytest.mark.parametrize("primitive", ["open", "write", "fsync"])
def test_a_new_file_that_fails_is_told(tmp_path, monkeypatch, primitive):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(atomic, primitive, fail)
    with pytest.raises(Io, match=f"^cannot write {tmp_path}/file: Input/output error; the device"):
        atomic.write_new(tmp_path / "file", [b"x"])
    monkeypatch.undo()
    (tmp_path / "there").write_bytes(b"old")
    with pytest.raises(Io, match="File exists"):
        atomic.write_new(tmp_path / "there", [b"x"])
    assert (tmp_path / "there").read_bytes() == b"old"


def test_a_new_file_is_flushed_once_it_is_whole(tmp_path, monkeypatch):
    seen = []
    fsync = atomic.fsync
    monkeypatch.setattr(
        atomic, "fsync", lambda fd: (seen.append((tmp_path / "file").read_bytes()), fsync(fd))
    )
    anew(tmp_path / "file", bytes(range(256)))
    assert seen == [bytes(range(256))]
