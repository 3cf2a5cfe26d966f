"""What can befall a checkpoint, every way as a function that does it to the directory."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.campaigns import forged
from bench.campaigns.trial import FOREIGN, INTACT, MANIFEST, Trial

_BLOCK = 4096
_LOADABLE = (
    "model-00002-of-00002.safetensors", "adapter_model.safetensors", "pytorch_model.bin",
    "training_args.bin", "model.pt", "added_tokens.json", "special_tokens_map.json",
    "model.safetensors.index.json", "chat_template.jinja",
)  # fmt: skip


class Sources(NamedTuple):
    """Intact checkpoints: the one that is damaged, an older one of its run, one of another run."""

    newest: Path
    older: Path
    foreign: Path


def trials(sources: Sources, flips: int, seed: int) -> Iterator[Trial]:
    """Every trial; of the flipped bits `flips` per file, at places drawn from `seed`."""
    files = sorted(path.name for path in sources.newest.iterdir())
    for name in files:
        size = (sources.newest / name).stat().st_size
        yield from _cuts(sources, name, size)
        yield from _flips(sources, name, size, flips, seed)
        yield from _bytes_changed(sources, name, size, seed)
        yield from _replaced(sources, name)
    yield Trial("two files swapped", "model.safetensors", _swap)
    for name in _LOADABLE:
        for content in (b"", b"{}"):
            yield Trial("a file too many", name, _writer(name, content))
    yield from _directories(sources)
    yield from forged.edits(sources.newest)
    yield from _no_damage(sources)


def _cuts(sources: Sources, name: str, size: int) -> Iterator[Trial]:
    ends = {0, 1, 8, size - 1, *range(_BLOCK, size, _BLOCK)}
    if name.endswith(".safetensors"):
        header = header_end(sources.newest / name)
        ends |= {header - 1, header, header + 1}
    for end in sorted(ends):
        if end < size:
            kind = "emptied" if end == 0 else "cut short"
            yield Trial(kind, name, lambda at, end=end: os.truncate(at / name, end))


def _flips(sources: Sources, name: str, size: int, flips: int, seed: int) -> Iterator[Trial]:
    draw = random.Random(f"{seed} {name}")
    header = header_end(sources.newest / name) if name.endswith(".safetensors") else 0
    for number in range(flips):
        # half of them in the header, which is a small part of the file
        inside = header and number % 2
        place = draw.randrange(header) if inside else draw.randrange(header, size)
        bit = draw.randrange(8)
        if name == MANIFEST:
            kind = "a bit flipped in the manifest"
        elif header:
            kind = "a bit flipped in a header" if inside else "a bit flipped in tensors"
        else:
            kind = "a bit flipped in JSON"
        yield Trial(kind, name, lambda at, place=place, bit=bit: _flip(at / name, place, bit))


def _bytes_changed(sources: Sources, name: str, size: int, seed: int) -> Iterator[Trial]:
    draw = random.Random(f"{seed} {name} blocks")
    for byte in (b"\0", b"x", b"}", b"\xff"):
        yield Trial("a byte appended", name, lambda at, byte=byte: _append(at / name, byte))
    for start in draw.sample(range(0, size, _BLOCK), min(8, -(-size // _BLOCK))):
        yield Trial("a block of zeros", name, lambda at, start=start: _zero(at / name, start))
    yield Trial("first byte lost", name, lambda at: _rewrite(at / name, lambda data: data[1:]))


def _replaced(sources: Sources, name: str) -> Iterator[Trial]:
    def older(at: Path) -> None:
        shutil.copy(sources.older / name, at / name)

    def foreign(at: Path) -> None:
        shutil.copy(sources.foreign / name, at / name)

    def link(at: Path) -> None:
        (at / name).unlink()
        (at / name).symlink_to(sources.newest.absolute() / name)

    def dangling(at: Path) -> None:
        (at / name).unlink()
        (at / name).symlink_to(at.absolute() / "nowhere")

    def folder(at: Path) -> None:
        (at / name).unlink()
        (at / name).mkdir()

    own = (sources.newest / name).read_bytes()
    yield Trial("a file deleted", name, lambda at: (at / name).unlink())
    if (sources.older / name).read_bytes() != own:
        yield Trial("a file of an older checkpoint", name, older)
    if (sources.foreign / name).read_bytes() != own:
        if name == MANIFEST:
            # whole in itself, it says whose it is
            yield Trial("the manifest of another run", name, foreign, FOREIGN)
        else:
            yield Trial("a file of another run", name, foreign)
    yield Trial("a link to the same bytes", "", link, INTACT)
    yield Trial("a link to nothing", name, dangling)
    yield Trial("a folder instead of a file", name, folder)


def _directories(sources: Sources) -> Iterator[Trial]:
    def replace_by(source: Path) -> Callable[[Path], None]:
        def act(at: Path) -> None:
            shutil.rmtree(at)
            shutil.copytree(source, at)

        return act

    def empty(at: Path) -> None:
        shutil.rmtree(at)
        at.mkdir()

    yield Trial("an older checkpoint renamed", MANIFEST, replace_by(sources.older))
    yield Trial("a checkpoint of another run", MANIFEST, replace_by(sources.foreign), FOREIGN)
    yield Trial("an empty directory", MANIFEST, empty)


def _no_damage(sources: Sources) -> Iterator[Trial]:
    def reformat(at: Path) -> None:
        found = json.loads((at / MANIFEST).read_bytes())
        (at / MANIFEST).write_text(json.dumps(found, sort_keys=True))

    def touch(at: Path) -> None:
        for path in at.iterdir():
            os.utime(path, (0, 0))

    for act in (
        reformat,
        touch,
        lambda at: _append(at / MANIFEST, b"\n"),
        lambda at: (at / "note.txt").write_text("the good one"),
        lambda at: None,
    ):
        yield Trial("no damage", "", act, INTACT)


def header_end(path: Path) -> int:
    """Where the header of a safetensors file ends."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def _append(path: Path, byte: bytes) -> None:
    with path.open("ab") as file:
        file.write(byte)


def _zero(path: Path, start: int) -> None:
    data = path.read_bytes()
    path.write_bytes(
        data[:start] + bytes(len(data[start : start + _BLOCK])) + data[start + _BLOCK :]
    )


def _swap(at: Path) -> None:
    first, second = at / "model.safetensors", at / "optimizer.safetensors"
    first.rename(at / "third")
    second.rename(first)
    (at / "third").rename(second)


def _writer(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda at: (at / name).write_bytes(content)
