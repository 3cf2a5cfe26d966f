"""The simulated shares of our kernels, from the file that `fastbrain.kernels.report` writes.

What a share is a share of is said in `fastbrain.kernels.simulated`, which made the file.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any


def attention_share(direction: str, bf16: bool, head_dim: int, seq: int) -> float:
    """Of the peak that attention reaches; `direction` is "forward" or "backward".

    A width that the kernels do not cover is taken as the next one, filled up with zeros.
    """
    widths = [row["head_dim"] for row in simulated()["attention"]]
    covered: int = min((w for w in widths if w >= head_dim), default=max(widths))
    row = _row("attention", name=direction, dtype=_dtype(bf16), head_dim=covered)
    return _between(row["size"], row["share"], seq) * min(float(head_dim) / covered, 1.0)


def expert_share(kernel: str, bf16: bool, size: float) -> float:
    """Of the peak that an expert product reaches; for `size` see `fastbrain.kernels.simulated`."""
    row = _row("products", name=kernel, dtype=_dtype(bf16))
    return _between(row["size"], row["share"], size)


@cache
def simulated() -> Mapping[str, Any]:
    """The whole file."""
    text = (resources.files("fastbrain") / "plan" / "simulated.json").read_text(encoding="utf-8")
    content: Mapping[str, Any] = json.loads(text)
    return content


def _row(table: str, **wanted: object) -> Mapping[str, Any]:
    rows: list[Mapping[str, Any]] = simulated()[table]
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def _dtype(bf16: bool) -> str:
    return "bf16" if bf16 else "fp32"


def _between(sizes: Sequence[float], shares: Sequence[float], size: float) -> float:
    """Interpolated over the logarithm of the size; the end's share beyond the ends."""
    at = bisect_left(sizes, size)
    if at == 0 or at == len(sizes):
        return shares[min(at, len(sizes) - 1)]
    low, high = sizes[at - 1], sizes[at]
    weight = math.log(size / low) / math.log(high / low)
    return shares[at - 1] * (1 - weight) + shares[at] * weight
