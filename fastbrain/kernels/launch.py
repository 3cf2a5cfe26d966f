"""The one way a kernel starts, and the way to list launches instead of making them.

An operation's Python body allocates its results and launches its kernels. On tensors without data
(meta and fake ones) the launches do nothing, so the same body tells shapes and dtypes to
`torch.compile`. Under `recorded` it also tells which specialisations of which kernels a shape
needs: so the report knows what to compile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FAMILIES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90"}
HOME = "sm_86"  # the home card's, which any card not listed takes too


class Launch(NamedTuple):
    """One kernel start: positional arguments as given, compile-time ones and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Record(NamedTuple):
    family: str
    launches: list[Launch]


_record: _Record | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Starts `kernel` with these arguments; `options` are its constexprs, num_warps, num_stages."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if any(x.is_meta or isinstance(x, FakeTensor) for x in tensors):
        if _record is not None:
            _record.launches.append(Launch(kernel, grid, args, options))
        return
    # Triton launches on the current device, whichever device the tensors are on
    with torch.cuda.device_of(tensors[0]):
        # stated because its default flips in Triton 3.10, and 3.9 warns where it is not
        kernel[grid](*args, **options, enable_fp_fusion=True)


@contextmanager
def recorded(family: str) -> Iterator[list[Launch]]:
    """Lists the launches that operations on meta tensors make inside the block, for one family."""
    global _record
    before, _record = _record, _Record(family, [])
    try:
        yield _record.launches
    finally:
        _record = before


def family_of(x: Tensor) -> str:
    """The card family whose tiles suit x's device."""
    if _record is not None:
        return _record.family
    return _card_family(x.device.index or 0) if x.is_cuda else HOME


@cache
def _card_family(index: int) -> str:
    return FAMILIES.get(torch.cuda.get_device_capability(index), HOME)
