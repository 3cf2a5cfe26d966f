"""Weights as the crate's `.rbw`: one JSON header, then every matrix in a fixed order.

    RBWTS001 | u64 H | H bytes of JSON | u64 P | P times (u64 rows, u64 cols, payload)

A payload is the FP32 values row by row, or, with `Precision.Q8`, per row one FP32 scale and a
signed byte per value. There is no checksum and no padding. Files are written and read in blocks of
rows, so neither takes memory of the file's size.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastbrain.atomic import StrPath, replacing
from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats import header as keys
from fastbrain.formats.binary import (
    Matrix,
    Reader,
    assign,
    row_blocks,
    to_floats,
    wrong_count,
)
from fastbrain.formats.strict_json import loads, short
from fastbrain.optim import Optimizer
from fastbrain.precision import Precision
from fastbrain.transformer import pieces

MAGIC = b"RBWTS001"
MAX_HEADER_BYTES = 1 << 20
_OF = "the configuration in its header"


@dataclass(frozen=True)
class Header:
    """What a weights file says before its tensors, and where those begin.

    Attributes:
        offset: the byte at which the first tensor's shape stands.
    """

    config: TransformerConfig
    optimizer: Optimizer
    optimizer_step: int
    precision: Precision
    offset: int


def write(
    path: StrPath,
    config: TransformerConfig,
    optimizer: Optimizer,
    optimizer_step: int,
    tensors: Iterable[tuple[str, Tensor]],
    precision: Precision,
) -> None:
    """Write a weights file durably: it is there whole, or the old one still is.

    Args:
        tensors: every tensor of `transformer.pieces(config)`, in that order, as (name, matrix);
            FP32, on any device.

    Raises:
        InvalidConfig: a value that `precision` or JSON cannot hold.
        Io: the file cannot be written.
    """
    precision = Precision(precision)
    described = {
        "config": keys.config_object(config),
        "optimizer": keys.optimizer_object(optimizer),
        "optimizer_step": optimizer_step,
        "precision": str(precision),
    }
    text = keys.dumps(described).encode()
    expected = pieces(config)
    with replacing(path) as file:
        file.write(MAGIC + struct.pack("<Q", len(text)) + text + struct.pack("<Q", len(expected)))
        for piece, (name, tensor) in zip(expected, tensors, strict=True):
            assert (name, *tensor.shape) == (piece.name, piece.rows, piece.cols), name
            file.write(struct.pack("<QQ", piece.rows, piece.cols))
            for block in row_blocks(piece.rows, 4 * piece.cols):
                values = to_floats(tensor[block])
                if precision is Precision.Q8:
                    if not np.isfinite(values).all():
                        raise InvalidConfig(
                            f"cannot write {os.fspath(path)} as Q8: {name} holds NaN or infinite "
                            "values, which 8 bits cannot; save with Precision.F32 to examine "
                            "them, or go back to a checkpoint from before they appeared"
                        )
                    values = quantize(values)
                file.write(values.data)


def read_header(path: StrPath) -> Header:
    """Read what a weights file says of its model, and check all of the file but the values.

    The configuration is valid, the tensors have its number, order and shapes, and the file has the
    bytes that they need: a model may be allocated. Bytes past the end are warned of.

    Raises:
        InvalidSnapshot: not such a file, or its tensors are not those of its configuration.
        Serde: the header is not JSON, or lacks a key.
        InvalidConfig: the header's configuration is not valid or not supported.
        Io: the file is missing, unreadable or cut short.
    """
    with Reader(path) as file:
        file.magic(MAGIC)
        [length] = file.numbers(1)
        if length > MAX_HEADER_BYTES:
            raise InvalidSnapshot(
                f"{file.path} says that its header has {length} bytes, more than the "
                f"{MAX_HEADER_BYTES} allowed; it is damaged"
            )
        try:
            config, optimizer, step, precision = _parse(file.take(length))
        except (Serde, InvalidConfig) as error:
            raise type(error)(f"{file.path}: in its header, {error}") from error
        [count] = file.numbers(1)
        # before there is a list of them: a header can name more layers than memory has room for
        if count != _tensors(config):
            raise InvalidSnapshot(wrong_count(file.path, count, _tensors(config), _OF))
        file.require(file.tell() + 16 * count)
        file.check_tensors(count, _matrices(config), lambda r, c: r * _row_bytes(c, precision), _OF)
        return Header(config, optimizer, step, precision, file.tell())


def read_tensors(path: StrPath, header: Header, views: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor of a file into the matrix of its name.

    Args:
        header: what `read_header` found there.
        views: (name, matrix) for every tensor of the configuration, in file order.

    What `read_header` checked is not checked again, so only a failing disk, or a file that is
    changed meanwhile, can leave some of the matrices written and others not: load into a fresh
    model, and drop it if this raises.

    Raises:
        Io: the file cannot be read, or became shorter.
    """
    with Reader(path) as file:
        file.seek(header.offset)
        for matrix, (name, view) in zip(_matrices(header.config), views, strict=True):
            assert (name, *view.shape) == matrix, name
            file.numbers(2)
            for block in row_blocks(matrix.rows, 4 * matrix.cols):
                rows = block.stop - block.start
                if header.precision is Precision.Q8:
                    packed = file.array((rows, _row_bytes(matrix.cols, Precision.Q8)), np.uint8)
                    assign(view[block], dequantize(packed))
                else:
                    assign(view[block], file.array((rows, matrix.cols), "<f4"))


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack rows of finite FP32 values (rows, cols) as bytes (rows, 4 + cols): scale, then values.

    A row's scale is its largest magnitude / 127 in FP32. Values are divided by it in FP32 and
    rounded half away from zero; a row without magnitude gets scale 0 and zeros.
    """
    rows, cols = values.shape
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    # in FP64, because 0.49999997 + 0.5 is 1 in FP32
    wide = scaled.astype(np.float64)
    rounded = np.copysign(np.floor(np.abs(wide) + 0.5), wide).clip(-127, 127)
    packed = np.empty((rows, 4 + cols), np.uint8)
    packed[:, :4] = scale.astype("<f4").view(np.uint8)
    packed[:, 4:] = rounded.astype(np.int8).view(np.uint8)
    return packed


def dequantize(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The FP32 values (rows, cols) of rows that `quantize` packed."""
    scale = packed[:, :4].copy().view("<f4").astype(np.float32, copy=False)
    with np.errstate(all="ignore"):  # a scale that is no number makes weights that are none
        return packed[:, 4:].view(np.int8).astype(np.float32) * scale


def _parse(data: bytes) -> tuple[TransformerConfig, Optimizer, int, Precision]:
    found = loads(data)
    if not isinstance(found, dict):
        raise Serde(f"there must be an object, not {short(found)}")
    for key in ("config", "optimizer", "optimizer_step", "precision"):
        if key not in found:
            raise Serde(f"the key {key} is missing")
    precision = found["precision"]
    if precision not in list(Precision):
        raise Serde(f"precision must be F32 or Q8, not {short(precision)}")
    return (
        keys.config_from_object(found["config"]),
        keys.optimizer_from_object(found["optimizer"]),
        keys.integer(found["optimizer_step"], "optimizer_step"),
        Precision(precision),
    )


def _matrices(config: TransformerConfig) -> list[Matrix]:
    return [Matrix(piece.name, piece.rows, piece.cols) for piece in pieces(config)]


def _tensors(config: TransformerConfig) -> int:
    moe = len(set(config.moe_layers))
    experts = 3 * config.num_experts + (3 if config.shared_expert else 0)
    # every projection of an adapted model is followed by two more tensors
    each = 1 if config.lora is None else 3
    dense_block, moe_block = 2 + 7 * each, 3 + (4 + experts) * each
    whole = 2 if config.tie_embeddings else 3
    return whole + dense_block * (config.n_layers - moe) + moe_block * moe


def _row_bytes(cols: int, precision: Precision) -> int:
    return 4 + cols if precision is Precision.Q8 else 4 * cols
