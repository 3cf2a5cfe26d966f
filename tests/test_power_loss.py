"""A power loss at any moment of a save leaves the old checkpoint or the new one, whole.

What a disk holds afterwards is worked out from the operations that were done: a file's bytes are
sure up to its last fsync, a directory's names as they were at its last sync. Of all later, any
part may have come to the disk.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from training_runs import bits, entered, run

from bench.campaigns import shim
from fastbrain.training import metrics
from fastbrain.training.run_dir import RunDir

STEPS = 4
# what is deleted, and a best checkpoint, are part of it
OVERRIDES = (f"train.max_steps={STEPS}", "save.interval_steps=1", "save.keep=1", "eval.interval=2")


@dataclass
class File:
    live: bytes = b""
    sure: bytes = b""


@dataclass
class Directory:
    live: dict[str, "File | Directory"] = field(default_factory=dict)
    sure: dict[str, "File | Directory"] = field(default_factory=dict)


class Disk:
    """Follows operations; `top` is taken to be there whatever happens."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = Directory()
        self._open: dict[int, File] = {}

    def parent(self, path: Path) -> dict[str, Any]:
        return self.at(path.parent).live

    def at(self, path: Path) -> Directory:
        found = self.root
        for name in path.relative_to(self.top).parts:
            found = found.live.setdefault(name, Directory())
        return found

    def apply(self, name: str, *arguments: Any) -> None:
        match name, arguments:
            case _, (Path() as path, *_) if not path.is_relative_to(self.top):
                pass
            case "mkdir", (path,) if path != self.top:
                self.parent(path).setdefault(path.name, Directory())
            case "open", (path, fd):
                self._open[fd] = self.parent(path)[path.name] = File()
            case "write", (fd, data) if fd in self._open:
                self._open[fd].live += data
            case "fsync", (fd,) if fd in self._open:
                # the last that is done to a file; its number is free for another one then
                file = self._open.pop(fd)
                file.sure = file.live
            case "rename", (source, target):
                moved = self.parent(source).pop(source.name)
                self.parent(target)[target.name] = moved
                if target.name.startswith(".tmp-del-"):
                    moved.live = {}  # what is in it is deleted next
            case "sync_dir", (path,):
                directory = self.at(path)
                directory.sure = dict(directory.live)


Choice = Callable[[File | Directory], Any]


def sure(node: File | Directory) -> Any:
    return node.sure


def live(node: File | Directory) -> Any:
    return node.live


def names_alone(node: File | Directory) -> Any:
    return node.live if isinstance(node, Directory) else node.sure


def bytes_alone(node: File | Directory) -> Any:
    return node.sure if isinstance(node, Directory) else node.live


def mixture(seed: int) -> Choice:
    """Of every name and every file another part; what is missing of a file may be zeros."""
    draw = random.Random(seed)

    def choose(node: File | Directory) -> Any:
        if isinstance(node, Directory):
            both = node.sure | node.live
            return {
                name: child
                for name, child in both.items()
                if draw.random() < 0.5 or node.sure.get(name) is node.live.get(name)
            }
        if node.sure == node.live:
            return node.live
        cut = draw.randint(len(node.sure), len(node.live))
        return node.live[:cut] + bytes(draw.choice([0, len(node.live) - cut]))

    return choose


def rebuild(node: File | Directory, path: Path, choose: Choice) -> None:
    chosen = choose(node)
    if isinstance(node, File):
        path.write_bytes(chosen)
        return
    path.mkdir(exist_ok=True)
    for name, child in chosen.items():
        rebuild(child, path / name, choose)


@contextmanager
def recorded(done: list[tuple[Any, ...]]) -> Iterator[None]:
    """Note what is done to the disk, in order."""
    make = os.mkdir

    def mkdir(path: Any, *rest: Any, **named: Any) -> None:
        make(path, *rest, **named)
        done.append(("mkdir", Path(path).absolute()))

    def note(name: str, arguments: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        result = real(*arguments)
        match name:
            case "open":
                done.append((name, Path(arguments[0]).absolute(), result))
            case "write":
                done.append((name, arguments[0], bytes(arguments[1])[:result]))
            case "fsync":
                done.append((name, arguments[0]))
                log = Path("whole", "metrics.jsonl")
                if log.exists() and os.path.samestat(os.fstat(arguments[0]), log.stat()):
                    done.append(("rows", max(row["step"] for row in metrics.read(log))))
            case _:
                done.append((name, *(Path(path).absolute() for path in arguments)))
        return result

    with pytest.MonkeyPatch.context() as patch, shim.watched(note):
        patch.setattr(os, "mkdir", mkdir)
        yield


@dataclass
class Recorded:
    """What a short run did to the disk, and the bits of every checkpoint that it wrote."""

    operations: list[tuple[Any, ...]]
    saved: dict[int, tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    operations: list[tuple[Any, ...]] = []
    with entered(tmp_path_factory.mktemp("runs")):
        with recorded(operations):
            assert run("whole", *OVERRIDES) == 0
        assert run("kept", *OVERRIDES, "save.keep=9") == 0
        yield Recorded(operations, {k: bits("kept", k) for k in range(1, STEPS + 1)})


def newest(there: Path, saved: dict[int, tuple[bytes, bytes]]) -> int:
    """The step of the newest intact checkpoint, whose bits are those that were written."""
    found = RunDir.open(there).newest(lambda _: None)
    assert found is not None
    assert bits(str(there), found.step) == saved[found.step]
    return found.step


def lose_power(recording: Recorded, first: int, ways: Callable[[int], list[Choice]]) -> int:
    """Lose power before each operation after the commit of `first`, in several ways each.

    Returns in how many cases the newest checkpoint was one whose save had not returned yet.
    """
    disk = Disk(Path("whole").absolute())
    early = certain = begun = 0
    for place, operation in enumerate([*recording.operations, ("nothing",)]):
        if certain >= first:
            for number, choose in enumerate(ways(place)):
                there = Path(f"loss-{place}-{number}")
                rebuild(disk.root, there, choose)
                step = newest(there, recording.saved)
                assert certain <= step <= begun
                early += step > certain
                shutil.rmtree(there)
        match operation:
            case ("rename", _, target) if target.name[5:].isdigit():
                begun = int(target.name[5:])
            case ("sync_dir", path) if path.name == "checkpoints":
                certain = begun
        disk.apply(*operation)
    assert certain == STEPS
    return early


PLAIN = [sure, live, names_alone, bytes_alone]


def test_power_lost_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(recording):
    def ways(place: int) -> list[Choice]:
        # a file is written in many pieces, of which none but the first changes much
        in_a_file = all(each[0] == "write" for each in recording.operations[place - 2 : place])
        return [] if in_a_file and place % 8 else [*PLAIN, mixture(place)]

    early = lose_power(recording, STEPS - 1, ways)
    assert early > 0  # or no loss fell between a rename and its sync


@pytest.mark.slow
def test_power_lost_anywhere_in_a_run_leaves_whatever_part_a_checkpoint(recording):
    def ways(place: int) -> list[Choice]:
        return [*PLAIN, *(mixture(8 * place + number) for number in range(8))]

    assert lose_power(recording, 1, ways) > 0


def test_a_run_goes_on_after_a_power_loss_to_the_same_bits(recording):
    committed = [n for n, each in enumerate(recording.operations) if is_commit(each, STEPS)]
    for place in (committed[0] - 1, committed[0] + 2):  # before the new name is sure, and after
        disk = Disk(Path("whole").absolute())
        for operation in recording.operations[:place]:
            disk.apply(*operation)
        there = Path(f"resumed-{place}")
        rebuild(disk.root, there, sure)
        # rows are not written through these operations; without them the run begins its log anew
        shutil.copytree("whole/data", there / "data", dirs_exist_ok=True)
        assert run(str(there), *OVERRIDES, "--resume", "auto") == 0
        assert bits(str(there), STEPS) == recording.saved[STEPS]


def test_the_rows_of_the_steps_of_a_checkpoint_are_flushed_before_it(recording):
    sure = 0
    for operation in recording.operations:
        match operation:
            case ("rows", step):
                sure = step
            case ("rename", _, target) if target.name[5:].isdigit():
                assert sure >= int(target.name[5:])
    assert sure == STEPS


def is_commit(operation: tuple[Any, ...], step: int) -> bool:
    return operation[0] == "rename" and operation[2].name == f"step-{step:08d}"


def test_a_file_that_is_not_flushed_is_lost_here(tmp_path):
    """The model of a disk can tell a durable write from one that is not."""
    top = tmp_path / "top"
    for flushed, expected in ((True, b"new"), (False, b"")):
        disk = Disk(top)
        disk.apply("open", top / "file", 3)
        disk.apply("write", 3, b"new")
        if flushed:
            disk.apply("fsync", 3)
        disk.apply("rename", top / "file", top / "name")
        rebuild(disk.root, tmp_path / f"before-{flushed}", sure)
        assert not list((tmp_path / f"before-{flushed}").iterdir())
        disk.apply("sync_dir", top)
        rebuild(disk.root, tmp_path / f"after-{flushed}", sure)
        assert (tmp_path / f"after-{flushed}" / "name").read_bytes() == expected
