"""Tensors by name in one file, in the safetensors format.

The library's reader takes a header at its word, accepts a name twice, and allocates before it
checks; its writer neither flushes to the disk nor gives a file the mode of the umask, and what it
wrote would have to be read again to be hashed. So headers are proved sound here first, and files
are written by `atomic`, byte for byte those of the library.
"""

import json
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastbrain.atomic import StrPath, io_errors, replacing
from fastbrain.errors import InvalidSnapshot, Serde
from fastbrain.formats.binary import Reader
from fastbrain.formats.names import listed
from fastbrain.formats.strict_json import loads, short

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 50_000  # with moments, three times what 350M parameters have been cut into

# in the order in which the library lays tensors out: the widest alignment first
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}
# more than a name, a shape and what may stand in the metadata take
_BYTES_PER_TENSOR = 2_048
_SPARE_BYTES = 4 << 20
_OFFSETS_KEY = b'"data_offsets"'
_FOR_PYTORCH: Mapping[str, str] = MappingProxyType({"format": "pt"})
_PIECE_BYTES = 4 << 20


class Entry(NamedTuple):
    """A tensor in a safetensors file: `start` and `end` are byte offsets from the file's begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def check_safetensors_header(path: StrPath) -> dict[str, Entry]:
    """What tensors a safetensors file holds, once its header has been proved sound.

    The header is at most 100 MB and inside the file, its names are unique, and the tensors' shapes
    fill the rest of the file without gap or overlap. Nothing is allocated on its word before.

    Raises:
        Io: the file is missing, unreadable or cut short.
        Serde: the header is not JSON, or an entry is not what it should be.
        InvalidSnapshot: offsets, shapes and the file's size do not agree.
    """
    with Reader(path) as file:
        [length] = file.numbers(1)
        if length > MAX_HEADER_BYTES:
            raise InvalidSnapshot(
                f"{file.path} says that its header has {length} bytes, more than the "
                f"{MAX_HEADER_BYTES} allowed; it is damaged or not a safetensors file"
            )
        data_start = 8 + length
        file.require(data_start, f"its header ends at {data_start}")
        _refuse_too_many(file, length)
        try:
            entries = _entries(loads(file.take(length)), data_start)
        except (Serde, InvalidSnapshot) as error:
            raise type(error)(f"{file.path}: in its header, {error}") from error
        end = data_start
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != end:
                raise InvalidSnapshot(
                    f"{file.path}: tensor {short(name)} starts at byte {entry.start} of the file, "
                    f"but what is before it ends at {end}; the file is damaged"
                )
            end = entry.end
        file.require(end, f"its header implies {end}")
        if end < file.size:
            raise InvalidSnapshot(
                f"{file.path} has {file.size} bytes, but its header implies {end}; "
                "the file is damaged"
            )
    return entries


def check_fits(path: StrPath, views: Mapping[str, Tensor]) -> None:
    """Check that a safetensors file holds these tensors and no others.

    Raises:
        InvalidSnapshot: another set of names, another shape or dtype; lists up to five of each.
        Io, Serde: as `check_safetensors_header`.
    """
    differences = _differences(check_safetensors_header(path), views)
    if differences:
        raise InvalidSnapshot(
            f"{os.fspath(path)} does not fit this model: {'; '.join(differences)}"
        )


def read_tensors(path: StrPath, views: Mapping[str, Tensor]) -> None:
    """Copy a safetensors file into the tensors of the same names, one at a time.

    Names, shapes and dtypes must be the same on both sides; if they are not, nothing is written.
    Only a failing disk, or a file changed in place meanwhile, can stop the copy half-way. Where
    several files must fit, call `check_fits` on each of them first.

    Raises:
        InvalidSnapshot, Io, Serde: as `check_fits`.
    """
    check_fits(path, views)
    copy_tensors(path, views)


def copy_tensors(path: StrPath, views: Mapping[str, Tensor]) -> None:
    """Copy some of the tensors of a file that `check_fits` has passed.

    Raises:
        InvalidSnapshot: the file is no longer what it was.
        Io: it cannot be read.
    """
    try:
        with io_errors("read", path), safe_open(path, framework="pt", device="cpu") as file:
            for name, view in views.items():
                with torch.no_grad():
                    view.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise InvalidSnapshot(f"cannot read {os.fspath(path)}: {error}") from error


def write_tensors(
    path: StrPath,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] = _FOR_PYTORCH,
) -> None:
    """Write a safetensors file durably: it is there whole, or the old one still is.

    Args:
        tensors: by name; on any device, of any strides.
        metadata: text for the header; transformers wants `format`.

    Raises:
        Io: the file cannot be written.
    """
    with replacing(path) as file:
        for piece in pieces(tensors, metadata):
            file.write(piece)


def pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = _FOR_PYTORCH
) -> Iterator[memoryview]:
    """The bytes of a safetensors file in order, in pieces of at most 4 MiB.

    They are those of the library. Tensors are brought to the host one at a time.

    Args:
        tensors: by name; on any device, of any strides.
        metadata: text for the header.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
    order = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        whole = memoryview(flat.numpy().data)
        for first in range(0, whole.nbytes, _PIECE_BYTES):
            yield whole[first : first + _PIECE_BYTES]


def _refuse_too_many(file: Reader, length: int) -> None:
    # counted in the raw bytes: parsed, a million entries would take a gigabyte
    start, count, tail = file.tell(), 0, b""
    for first in range(0, length, 1 << 20):
        piece = tail + file.take(min(1 << 20, length - first))
        count += piece.count(_OFFSETS_KEY)
        tail = piece[1 - len(_OFFSETS_KEY) :]
    if count > MAX_TENSORS:
        raise InvalidSnapshot(
            f"{file.path} names {count} tensors, more than the {MAX_TENSORS} allowed"
        )
    if length > _SPARE_BYTES + _BYTES_PER_TENSOR * count:
        raise InvalidSnapshot(
            f"{file.path} has a header of {length} bytes for {count} tensors, more than their "
            "names and shapes take; it is damaged"
        )
    file.seek(start)


def _entries(found: Any, data_start: int) -> dict[str, Entry]:
    if not isinstance(found, dict):
        raise Serde(f"there must be an object, not {short(found)}")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Serde(f"__metadata__ must hold texts, not {short(metadata)}")
    return {name: _entry(name, value, data_start) for name, value in found.items()}


def _entry(name: str, value: Any, data_start: int) -> Entry:
    where = f"tensor {short(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise Serde(f"{where} must have dtype, shape and data_offsets, not {short(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise InvalidSnapshot(
            f"{where} has dtype {short(dtype)}; known are {', '.join(_ITEM_BYTES)}"
        )
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise Serde(f"{where} must have whole numbers as {key}, not {short(numbers)}")
    if len(offsets) != 2:
        raise Serde(f"{where} must have two data_offsets, not {short(offsets)}")
    span = offsets[1] - offsets[0]
    if _bytes(shape, _ITEM_BYTES[dtype], span) != span:
        raise InvalidSnapshot(
            f"{where} of shape {short(shape)} and dtype {dtype} does not fill its {span} bytes; "
            "the file is damaged"
        )
    return Entry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _bytes(shape: list[int], item: int, enough: int) -> int:
    # stops when past the span: the product of a million huge sizes would take minutes
    total = 0 if 0 in shape else item
    for size in shape:
        total *= size
        if total > enough:
            break
    return total


def _differences(found: Mapping[str, Entry], views: Mapping[str, Tensor]) -> list[str]:
    both = [name for name in views if name in found]
    shapes = [(n, found[n].shape, tuple(views[n].shape)) for n in both]
    dtypes = [(n, found[n].dtype, _DTYPES.get(views[n].dtype)) for n in both]
    return [
        *listed("the file lacks {} of its tensors", [n for n in views if n not in found]),
        *listed(
            "the file has {} tensors that the model lacks", [n for n in found if n not in views]
        ),
        *listed("{} shapes differ", [_two(*each) for each in shapes if each[1] != each[2]]),
        *listed("{} dtypes differ", [_two(*each) for each in dtypes if each[1] != each[2]]),
    ]


def _two(name: str, in_file: object, in_model: object) -> str:
    return f"{name} is {in_file} in the file and {in_model} in the model"
