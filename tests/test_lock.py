"""One writer for a run: a second one is refused at once by name, and a dead one holds nothing."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import checkpoint, entered, run

from fastbrain import cli
from fastbrain.errors import Io
from fastbrain.training import lock
from fastbrain.training.lock import Lock, Locked

HOLD = """
import sys, time
from pathlib import Path
from fastbrain.training.lock import Lock
held = Lock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def held_elsewhere(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    child = held_elsewhere(tmp_path / "run")
    try:
        assert lock.is_held(tmp_path / "run")
        before = time.monotonic()
        with pytest.raises(
            Locked, match=f"by process {child.pid} on {socket.gethostname()}, since"
        ):
            Lock.acquire(tmp_path / "run")
        assert time.monotonic() - before < 1
    finally:
        end(child)
    # killed, not released
    assert not lock.is_held(tmp_path / "run")
    mine = Lock.acquire(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.lock").read_bytes())["pid"] == os.getpid()
    mine.release()
    mine.release()
    assert not lock.is_held(tmp_path / "run")


def test_a_lock_that_was_replaced_is_no_lock(tmp_path):
    mine = Lock.acquire(tmp_path)
    mine.check()
    (tmp_path / "run.lock").unlink()
    with pytest.raises(Locked, match=r"run\.lock was removed or replaced"):
        mine.check()
    other = Lock.acquire(tmp_path)
    with pytest.raises(Locked, match=r"another one may be training the run"):
        mine.check()
    other.check()
    for each in (mine, other):
        each.release()


def test_looking_at_a_lock_does_not_take_it(tmp_path):
    assert not lock.is_held(tmp_path)
    mine = Lock.acquire(tmp_path)
    assert lock.is_held(tmp_path)
    assert lock.is_held(tmp_path)
    mine.release()
    Lock.acquire(tmp_path).release()


def test_a_lock_file_of_any_content_can_be_taken(tmp_path):
    (tmp_path / "run.lock").write_bytes(b"\xff\x00 not json" * 100)
    assert lock.holder(tmp_path) is None
    Lock.acquire(tmp_path).release()
    assert lock.holder(tmp_path)["pid"] == os.getpid()


def test_a_run_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Io, match=r"cannot write to the run in .*/file/run: Not a directory"):
        Lock.acquire(tmp_path / "file" / "run")


def test_a_second_program_is_refused_with_exit_4_and_changes_nothing(tmp_path, capsys):
    with entered(tmp_path):
        assert run("first") == 0
        # what a killed writer left, and what a second one must not sweep away
        (Path("first") / "checkpoints" / ".tmp-step-9-1-aa").mkdir()
        child = held_elsewhere(Path("first"))
        try:
            for again in (
                lambda: cli.main(["resume", "first"]),
                lambda: cli.main(["resume", "first", "--step", "3"]),
                lambda: run("first", "--resume", "auto"),
            ):
                assert again() == 4
                assert f"first is being trained by process {child.pid}" in capsys.readouterr().err
        finally:
            end(child)
        assert checkpoint("first", 6).is_dir()
        assert (Path("first") / "checkpoints" / ".tmp-step-9-1-aa").is_dir()
        assert cli.main(["resume", "first"]) == 0
        assert not (Path("first") / "checkpoints" / ".tmp-step-9-1-aa").exists()
        # and it is free when the program has ended, however it ended
        assert cli.main(["resume", "first", "train.seed=3"]) == 2
        assert not lock.is_held(Path("first"))
