"""The safetensors files of a Hugging Face directory, taken as one: every tensor, found by name."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastbrain.errors import InvalidConfig, InvalidSnapshot, Io, Serde
from fastbrain.formats.binary import Reader, row_blocks
from fastbrain.formats.safetensors_file import Entry, check_safetensors_header
from fastbrain.formats.strict_json import loads, short

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 1 << 20

_ITEMS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# more than a name, its file's name and what surrounds them take, and a few names more
_INDEX_BYTES_PER_TENSOR = 512
_SPARE_BYTES = 1 << 16


class Place(NamedTuple):
    """Where a tensor lies."""

    file: Path
    entry: Entry


def json_file(path: Path, most_bytes: int) -> Any:
    """Parse a JSON file that may be hostile.

    Raises:
        Io: it cannot be read.
        Serde: it is larger than `most_bytes`, or not strict JSON; names the file.
    """
    with Reader(path) as file:
        if file.size > most_bytes:
            raise Serde(
                f"{file.path} has {file.size} bytes, more than the {most_bytes} allowed for it"
            )
        data = file.take(file.size)
    try:
        return loads(data)
    except Serde as error:
        raise Serde(f"{path}: {error}") from error


def find_tensors(directory: Path, expected: int) -> dict[str, Place]:
    """Every tensor of a directory, once all headers have been proved sound.

    Args:
        expected: how many tensors there should be, at the least; bounds the index.

    Raises:
        InvalidConfig: there are only files of another format.
        InvalidSnapshot: the index and the files do not agree, or a header is damaged.
        Io: a file is missing or cut short.
        Serde: the index or a header is not JSON.
    """
    if (directory / SINGLE).exists():
        return {
            name: Place(directory / SINGLE, entry)
            for name, entry in check_safetensors_header(directory / SINGLE).items()
        }
    if not (directory / INDEX).exists():
        raise _nothing_to_read(directory)
    shards = _shards(directory, expected)
    found: dict[str, Place] = {}
    for shard in dict.fromkeys(shards.values()):
        for name, entry in check_safetensors_header(directory / shard).items():
            if name in found:
                raise InvalidSnapshot(
                    f"tensor {short(name)} is in {found[name].file} and in {directory / shard}"
                )
            if shards.get(name) != shard:
                raise InvalidSnapshot(
                    f"{directory / shard} holds tensor {short(name)}, of which {INDEX} says "
                    f"{short(shards.get(name))}; the files are not of one model"
                )
            found[name] = Place(directory / shard, entry)
    for name, shard in shards.items():
        if name not in found:
            raise InvalidSnapshot(
                f"{directory / shard} lacks tensor {short(name)}, which {INDEX} says is in it"
            )
    return found


def blocks(place: Place, rows: int, cols: int, unit: int = 1) -> Iterator[tuple[slice, Any]]:
    """The values of a tensor as (rows, FP32 array), a few megabytes of rows at a time.

    Args:
        rows, cols: how its values are looked at; as many as it has.
        unit: rows that must stay together; divides `rows`.

    Raises:
        Io: the file cannot be read, or became shorter.
    """
    with Reader(place.file) as file:
        file.seek(place.entry.start)
        for block in row_blocks(rows // unit, 4 * cols * unit):
            part = slice(block.start * unit, block.stop * unit)
            shape = (part.stop - part.start, cols)
            values = file.array(shape, _ITEMS[place.entry.dtype])
            yield part, _widened(values, place.entry.dtype)


def is_readable(entry: Entry) -> bool:
    """Whether a tensor is of a type that becomes FP32 here."""
    return entry.dtype in _ITEMS


def _widened(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _shards(directory: Path, expected: int) -> dict[str, str]:
    path = directory / INDEX
    index = json_file(path, _SPARE_BYTES + _INDEX_BYTES_PER_TENSOR * expected)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise Serde(f"{path} must have a weight_map of tensors to files, not {short(found)}")
    for name, shard in found.items():
        plain = isinstance(shard, str) and shard == os.path.basename(shard) and "\\" not in shard
        if not plain or not shard.endswith(".safetensors") or "\0" in shard:
            raise InvalidSnapshot(
                f"{path} says that tensor {short(name)} is in {short(shard)}; it must name a "
                ".safetensors file beside it, without a path"
            )
    return found


def _nothing_to_read(directory: Path) -> Exception:
    pickled = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth")
    )
    if pickled:
        return InvalidConfig(
            f"{directory} has its weights in {short(pickled[0])}, a format that can run code when "
            "it is read, so fastbrain does not; convert it with transformers: "
            f'AutoModelForCausalLM.from_pretrained("{directory}").save_pretrained("converted")'
        )
    return Io(f"there is neither {SINGLE} nor {INDEX} in {directory}")
