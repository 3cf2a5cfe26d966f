"""Ids as users hand them over (lists, arrays, tensors), made into one checked numpy array."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fastbrain.errors import FastBrainError

Ids: TypeAlias = Sequence[int] | npt.NDArray[Any] | Tensor
Integers: TypeAlias = npt.NDArray[np.integer[Any]]

U32_END = 1 << 32


def integers(ids: Ids | Iterable[int], what: str, kind: type[FastBrainError]) -> Integers:
    """`ids` as a 1-D integer array of whatever width they need, without a copy where possible.

    Raises `kind`, whose message begins with `what`, unless they are integers (booleans are not)
    in one dimension that fit 64 bits.
    """
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise kind(f"{what} must be integers, but the tensor is {ids.dtype}")
        ids = ids.detach().cpu().numpy()
    try:
        array = np.asarray(ids if hasattr(ids, "__len__") else list(ids))
    except (ValueError, OverflowError, TypeError) as error:
        raise kind(f"{what} must be one row of integers: {error}") from error
    if array.ndim != 1:
        raise kind(f"{what} must be one row of integers, but have {array.ndim} dimensions")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise kind(f"{what} must be integers that fit 64 bits, but {_culprit(array)}")
    return array


def check_range(
    array: Integers, end: int, what: str, kind: type[FastBrainError], first: int = 0
) -> None:
    """Raise `kind`, naming the first offender, unless all ids are in [0, end).

    `first` is the position of the array's first id among all those that the user knows.
    """
    if array.size and (int(array.min()) < 0 or int(array.max()) >= end):
        at = int(np.argmax((array < 0) | (array > end - 1)))
        raise kind(f"{what} must be from 0 to {end - 1}, but at {first + at} there is {array[at]}")


def _culprit(array: npt.NDArray[Any]) -> str:
    for position, value in enumerate(array.tolist()):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
            return f"the one at position {position} is {value!r}"
    return f"their type is {array.dtype}"
