"""An exported file is there whole or not at all, whatever fails or is killed on the way."""

import errno
import os
import subprocess
import sys

import pytest
from gguf_files import SMALL
from golden import golden_tensors

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, Io
from fastbrain.formats.gguf_write import write_gguf

pytest.importorskip("gguf")

PRIMITIVES = ["open", "write", "fsync", "rename", "sync_dir"]


def export(target, force=False):
    write_gguf(target, SMALL, list(golden_tensors(SMALL)), force=force)


def test_a_file_that_is_there_is_kept(tmp_path):
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")
    with pytest.raises(InvalidConfig, match="exists already"):
        export(target)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_file_that_is_there_is_replaced_when_asked(tmp_path):
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")
    export(target, force=True)
    export(tmp_path / "anew.gguf")
    # they differ in their names, which are inside
    assert target.stat().st_size >= 4 * 40 * 32
    assert sorted(os.listdir(tmp_path)) == ["anew.gguf", "model.gguf"]


def operations(monkeypatch, fail_at=None):
    """Count the changes of the disk; the one at `fail_at` finds it full."""
    done = []
    for name in PRIMITIVES:
        real = getattr(atomic, name)

        def counted(*args, real=real, name=name):
            done.append(name)
            if len(done) - 1 == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(atomic, name, counted)
    return done


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_disk_that_fails_at_any_operation_leaves_a_whole_file(tmp_path, monkeypatch, old):
    export(tmp_path / "model.gguf")
    right = (tmp_path / "model.gguf").read_bytes()
    with monkeypatch.context() as patch:
        done = operations(patch)
        export(tmp_path / "model.gguf", force=True)
    assert set(done) == set(PRIMITIVES)
    for at, name in enumerate(done):
        folder = tmp_path / str(at)
        folder.mkdir()
        target = folder / "model.gguf"
        if old is not None:
            target.write_bytes(old)
        with monkeypatch.context() as patch:
            operations(patch, at)
            with pytest.raises(Io, match="No space left"):
                export(target, force=old is not None)
        left = {each.name: each.read_bytes() for each in folder.iterdir()}
        renamed = name == "sync_dir"
        before = {} if old is None else {"model.gguf": old}
        assert left == ({"model.gguf": right} if renamed else before), name


KILLER = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from gguf_files import SMALL
from golden import golden_tensors
from fastbrain.formats.gguf_write import write_gguf

config = replace(SMALL, vocab_size=100_000)  # 26 MB
weights = list(golden_tensors(config))

folder, kills = Path(sys.argv[1]), int(sys.argv[3])
target = folder / "model.gguf"

def child():
    pid = os.fork()
    if pid == 0:
        write_gguf(target, config, weights, force=True)
        os._exit(0)
    return pid

write_gguf(target, config, weights)  # so that the children have everything imported
start = time.monotonic()
assert os.waitpid(child(), 0)[1] == 0
whole = time.monotonic() - start
right = target.read_bytes()
draw = random.Random(0)
killed = 0
for attempt in range(kills):
    if attempt % 2:
        target.unlink(missing_ok=True)
    pid = child()
    time.sleep(draw.uniform(0, 1.1 * whole))
    os.kill(pid, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    assert attempt % 2 or target.read_bytes() == right
    assert not target.exists() or target.read_bytes() == right
    if not target.exists():
        target.write_bytes(right)
# what was left half done is swept away by the next
assert os.waitpid(child(), 0)[1] == 0
assert os.listdir(folder) == ["model.gguf"]
print(killed)
"""


@pytest.mark.slow
def test_a_hundred_kills_leave_a_whole_file(tmp_path):
    command = [sys.executable, "-c", KILLER, tmp_path, os.path.dirname(__file__), "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
