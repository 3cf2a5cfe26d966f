"""Adapters as the crate's `.rbl`: their settings, then their matrices in file order.

    RBLOR001 | u64 H | H bytes of JSON {rank, alpha, seed} | u64 P | P times (u64 rows, u64 cols,
    FP32 values row by row)

The model that they belong to is not recorded, except by the shapes.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fastbrain.atomic import StrPath, replacing
from fastbrain.config import LoraConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.binary import (
    Matrix,
    Reader,
    assign,
    require_finite,
    row_blocks,
    to_floats,
)
from fastbrain.formats.header import dumps, lora_from_object, lora_object
from fastbrain.formats.strict_json import loads

MAGIC = b"RBLOR001"
_MAX_HEADER_BYTES = 1 << 16


def write(path: StrPath, lora: LoraConfig, adapters: Iterable[tuple[str, Tensor]]) -> None:
    """Write adapters durably: they are there whole, or the old file still is.

    Args:
        adapters: (name, matrix) of every `down` and `up` in file order; FP32, on any device.

    Raises:
        Io: the file cannot be written.
    """
    adapters = list(adapters)
    text = dumps(lora_object(lora)).encode()
    with replacing(path) as file:
        file.write(MAGIC + struct.pack("<Q", len(text)) + text + struct.pack("<Q", len(adapters)))
        for _, tensor in adapters:
            rows, cols = tensor.shape
            file.write(struct.pack("<QQ", rows, cols))
            for block in row_blocks(rows, 4 * cols):
                file.write(to_floats(tensor[block]).data)


def read(path: StrPath, lora: LoraConfig, adapters: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a file's adapters into the given matrices, once all of the file has been checked.

    Args:
        lora: the settings that the file must have, the seed included.
        adapters: (name, matrix) of every `down` and `up` in file order, to be overwritten.

    Raises:
        InvalidSnapshot: not such a file, adapters of other settings or of another model, or a
            value that is not a finite number.
        Serde: its header is damaged.
        Io: the file is missing, unreadable or cut short.
    """
    adapters = list(adapters)
    with Reader(path) as file:
        found = take_settings(file)
        if found != lora:
            raise InvalidSnapshot(
                f"{os.fspath(path)} holds an adapter of {_words(found)}, and this model has one of "
                f"{_words(lora)}; attach one with the settings of the file first"
            )
        [count] = file.numbers(1)
        expected = [Matrix(name, *tensor.shape) for name, tensor in adapters]
        file.check_tensors(count, expected, lambda rows, cols: 4 * rows * cols, "this model")
        start = file.tell()
        for name, _, values in _blocks(file, adapters):
            require_finite(values, path, name)
        file.seek(start)
        for _, view, values in _blocks(file, adapters):
            assign(view, values)


def read_settings(path: StrPath) -> LoraConfig:
    """What an adapter file says of rank, strength and seed; errors as `read`."""
    with Reader(path) as file:
        return take_settings(file)


def take_settings(file: Reader) -> LoraConfig:
    """The settings at the start of an open adapter file; errors as `read`."""
    file.magic(MAGIC)
    [length] = file.numbers(1)
    if length > _MAX_HEADER_BYTES:
        raise InvalidSnapshot(
            f"{file.path} says that its header has {length} bytes, more than the "
            f"{_MAX_HEADER_BYTES} allowed; it is damaged"
        )
    try:
        return lora_from_object(loads(file.take(length)))
    except (Serde, InvalidConfig) as error:
        raise type(error)(f"{file.path}: in its header, {error}") from error


def _blocks(
    file: Reader, adapters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, NDArray[Any]]]:
    """The name, some rows, and what the file has for them, for all rows in file order."""
    for name, tensor in adapters:
        rows, cols = file.numbers(2)
        for block in row_blocks(rows, 4 * cols):
            yield name, tensor[block], file.array((block.stop - block.start, cols), "<f4")


def _words(lora: LoraConfig) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha:g}, seed {lora.seed}"
