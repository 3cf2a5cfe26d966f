"""Optimizer moments as the crate's `.opt`, which says of its model nothing but the shapes.

    RBOPT001 | u64 P | u64 step | P times (u64 rows, u64 cols, first moments, second moments)

Moments are FP32, row by row, in the order of the weights file. A frozen tensor is 0 x 0. The kind
of optimizer and its settings are not recorded, so an Adam file loads under Lion.
"""

import os
import struct
from collections.abc import Iterable

from torch import Tensor

from fastbrain.atomic import StrPath, replacing
from fastbrain.errors import InvalidSnapshot
from fastbrain.formats.binary import Matrix, Reader, assign, row_blocks, to_floats

MAGIC = b"RBOPT001"


def write(path: StrPath, step: int, moments: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Write optimizer state durably: it is there whole, or the old one still is.

    Args:
        step: updates done so far.
        moments: (name, first, second) of every tensor in file order; matrices of equal shape,
            FP32, on any device; 0 x 0 for a frozen one.

    Raises:
        Io: the file cannot be written.
    """
    moments = list(moments)
    with replacing(path) as file:
        file.write(MAGIC + struct.pack("<QQ", len(moments), step))
        for name, first, second in moments:
            assert first.shape == second.shape, name
            rows, cols = first.shape
            file.write(struct.pack("<QQ", rows, cols))
            for moment in (first, second):
                for block in row_blocks(rows, 4 * cols):
                    file.write(to_floats(moment[block]).data)


def read(
    path: StrPath,
    moments: Iterable[tuple[str, Tensor, Tensor]],
    negated_matrices: bool = False,
) -> int:
    """Copy a file's moments into the given matrices; returns the step counter.

    Nothing is written before the whole file has been checked and read once. What could still leave
    some matrices old and others new is a file that someone changes in place during the copy.

    Args:
        moments: (name, first, second) of every tensor in file order, to be overwritten.
        negated_matrices: turn the sign of the first moment of every tensor with more than one
            row, which versions 2.0.0 and 2.0.1 of the crate wrote negated from CUDA.

    Raises:
        InvalidSnapshot: not such a file, or its tensors are not those of this model.
        Io: the file is missing, unreadable or cut short.
    """
    moments = list(moments)
    expected = [Matrix(name, *first.shape) for name, first, _ in moments]
    with Reader(path) as file:
        file.magic(MAGIC)
        count, step = file.numbers(2)
        if step >= 2**63:
            raise InvalidSnapshot(
                f"{os.fspath(path)} says that {step} updates were done; it is damaged"
            )
        file.check_tensors(count, expected, lambda rows, cols: 8 * rows * cols, "this model")
        file.read_through()
        for _, first, second in moments:
            rows, cols = file.numbers(2)
            for moment in (first, second):
                for block in row_blocks(rows, 4 * cols):
                    values = file.array((block.stop - block.start, cols), "<f4")
                    flip = negated_matrices and moment is first and rows > 1
                    assign(moment[block], -values if flip else values)
    return step
