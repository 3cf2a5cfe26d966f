"""Run by `test_whole_directory`: writes a directory and is killed before each of its operations.

    python directory_killer.py FOLDER old|new

Prints, for each operation, what its kill left under the name: nothing, the old or the new. It is a
program of its own because a process with other threads should not fork.
"""

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.campaigns import shim
from fastbrain import atomic
from fastbrain.errors import InvalidConfig
from fastbrain.formats.whole_directory import write_whole

OLD = {"config.json": b"{}", "old.txt": b"old"}
KNOWN = re.compile(r"config\.json|\w+\.txt")
NEW = {"config.json": b"{1}", "a.txt": b"a" * 100, "b.txt": b"b" * 100}


class Untouched(Exception):
    """Raised instead of writing anything."""


def write(target: Path, files: dict[str, bytes] = NEW, *, force: bool = True) -> None:
    def fill(directory: Path) -> None:
        for name, data in files.items():
            atomic.write_new(directory / name, [data])

    write_whole(target, fill, known=KNOWN, force=force)


def write_nothing(target: Path) -> None:
    """What any next call does first: putting things in order."""

    def fill(directory: Path) -> None:
        raise Untouched

    with suppress(Untouched, InvalidConfig):
        write_whole(target, fill)


def held(target: Path) -> dict[str, bytes] | None:
    return {path.name: path.read_bytes() for path in target.iterdir()} if target.exists() else None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def operations(work: Callable[[], None]) -> list[str]:
    """The names of the operations that the work does."""
    done: list[str] = []

    def note(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        done.append(name)
        return real(*arguments)

    with shim.watched(note):
        work()
    return done


def killed_at(number: int, work: Callable[[], None]) -> None:
    """Do the work in a child that dies before its operation of this number."""
    pid = os.fork()
    if pid == 0:
        left = number

        def watcher(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
            nonlocal left
            if left == 0:
                shim.die()
            left -= 1
            return real(*arguments)

        try:
            shim.install(watcher)
            work()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def main(folder: Path, begin: str) -> None:
    old = OLD if begin == "old" else None

    def begun(name: str) -> Path:
        (folder / name).mkdir()
        if old is not None:
            write(folder / name / "out", old)
        return folder / name / "out"

    whole = begun("whole")
    for number in range(len(operations(lambda: write(whole)))):
        target = begun(str(number))
        killed_at(number, lambda target=target: write(target))  # type: ignore[misc]
        left = held(target)
        assert left in (None, old, NEW), left
        write_nothing(target)
        assert held(target) in (old, NEW)
        assert names(target.parent) == ([] if held(target) is None else ["out"])
        write(target)
        assert held(target) == NEW
        assert names(target.parent) == ["out"]
        print("nothing" if left is None else "new" if left == NEW else "old")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
