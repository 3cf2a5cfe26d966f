"""A directory that is being written, stopped at any operation, is the old one or the new one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from directory_killer import NEW, OLD, held, names, operations, write

from bench.campaigns import shim
from fastbrain.errors import InvalidConfig, Io

TESTS = Path(__file__).parent


def printed(program, *arguments):
    done = subprocess.run(
        [sys.executable, TESTS / program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("begin", ["old", "nothing"])
def test_killed_at_any_operation_it_leaves_the_old_or_the_new_whole(tmp_path, begin):
    left = printed("directory_killer.py", tmp_path, begin)
    assert len(left) > 10
    # between the two renames the old one has another name, which the next call gives back
    between = ["nothing"] if begin == "old" else []
    assert left == [begin] * (len(left) - 1 - len(between)) + between + ["new"]


@pytest.mark.slow
def test_two_hundred_kills_of_an_export_leave_a_whole_model_each(tmp_path):
    killed, left = map(int, printed("export_killer.py", tmp_path, 200))
    assert killed > 50  # or the kills came too late to mean anything
    assert left > 50


@pytest.mark.parametrize("old", [None, OLD], ids=["new", "replaced"])
def test_failing_at_any_operation_it_leaves_the_old_or_the_new_whole(tmp_path, old):
    (tmp_path / "count").mkdir()
    if old is not None:
        write(tmp_path / "count" / "out", old)
    count = len(operations(lambda: write(tmp_path / "count" / "out")))
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        target = folder / "out"
        if old is not None:
            write(target, old)
        left = number

        def watcher(name, arguments, real):
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        with shim.watched(watcher), pytest.raises(Io, match="No space left"):
            write(target)
        # the last operation is the flush of a name that was given
        assert held(target) == (NEW if number == count - 1 else old)
        strays = [name for name in names(folder) if name != "out"]
        assert not strays or number == count - 1


def test_everything_is_flushed_before_the_name_is_given(tmp_path):
    write(tmp_path / "out", OLD)
    done = operations(lambda: write(tmp_path / "out"))
    per_file = ["open", "write", "fsync"]
    assert done == per_file * 3 + ["sync_dir", "rename", "rename", "sync_dir"]


def test_what_is_there_is_replaced_only_if_asked_and_only_if_it_is_a_models(tmp_path):
    target = tmp_path / "out"
    write(target, OLD)
    with pytest.raises(InvalidConfig, match="out exists already; choose another name"):
        write(target, force=False)
    home = tmp_path / "home"
    (home / "papers").mkdir(parents=True)
    (home / "config.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="home is not replaced, because it has papers in it"):
        write(home)
    noted = tmp_path / "noted"
    write(noted, OLD)
    (noted / "README.md").write_text("what I found out")
    with pytest.raises(InvalidConfig, match=r"it has README\.md in it, which would be lost"):
        write(noted)
    assert (noted / "README.md").exists()
    (tmp_path / "file").write_text("text")
    with pytest.raises(InvalidConfig, match="file is not a directory"):
        write(tmp_path / "file")
    assert held(target) == OLD
    assert (home / "papers").is_dir()
    assert names(tmp_path) == ["file", "home", "noted", "out"]


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk" / "model", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert held(tmp_path / "disk" / "model") == NEW


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".tmp-out-{dead.pid}-0a0b").mkdir()
    left = [f".tmp-out-{os.getpid()}-0a0b", f".tmp-out-of-date-{dead.pid}-0a0b"]
    for name in left:
        (tmp_path / name).mkdir()
    write(tmp_path / "out")
    assert names(tmp_path) == [*sorted(left), "out"]


@pytest.fixture
def dead():
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_are_told_by_their_name_as_it_is_written(tmp_path, dead):
    (tmp_path / f".tmp-a[b]-{dead}-0a0b").mkdir()
    (tmp_path / f".tmp-ab-{dead}-0a0b").mkdir()
    write(tmp_path / "a[b]")
    assert names(tmp_path) == [f".tmp-ab-{dead}-0a0b", "a[b]"]


def test_leftovers_of_another_user_may_be_of_the_living(tmp_path, dead, monkeypatch):
    def kill(pid, signal):
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / f".tmp-out-{dead}-0a0b").mkdir()
    monkeypatch.setattr(os, "kill", kill)
    write(tmp_path / "out")
    assert names(tmp_path) == [f".tmp-out-{dead}-0a0b", "out"]


def test_a_parent_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Io, match=r"cannot write .*missing/out: No such file"):
        write(tmp_path / "missing" / "out")
