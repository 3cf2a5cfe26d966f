"""The axes of a chart: which numbers they span, where a number lies, and which ones are written."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastbrain.training.report.words import short

# a chart whose numbers differ by more than this is easier to read on a logarithmic axis
_FAR_APART = 3.0
# the share of the numbers at either end that may lie outside: a spike must not flatten the rest
_OUTLIERS = 0.001

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high`, which are not equal; both above 0 on a logarithmic axis."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a number lies: 0 at the low end, 1 at the high one, NaN for none."""
        if self.logarithmic:
            if not value > 0:
                return math.nan
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers inside, at most `most` of them."""
        if self.logarithmic and self.high / self.low > 20:
            return _decades(self.low, self.high, most)
        return _round(self.low, self.high, most)


def spanning(values: Numbers, must: list[float]) -> Axis:
    """An axis for finite numbers: nearly all of `values`, and all of `must`."""
    ends = list(must)
    if len(values):
        ends += np.quantile(values, (_OUTLIERS, 1 - _OUTLIERS)).tolist()
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if low > 0 and high / low > _FAR_APART:
        room = (high / low) ** 0.04
        return Axis(low / room, high * room, logarithmic=True)
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return Axis(low - room if low < 0 or low > room else 0.0, high + room)


def from_zero(values: Numbers) -> Axis:
    """An axis for numbers that mean most when compared with 0."""
    high = float(values.max()) if len(values) else 0.0
    return Axis(0.0, high * 1.08 if high > 0 else 1.0)


def written(value: float) -> str:
    """A number beside an axis: short, but not rounded."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.6g}{name}"
    return "0" if value == 0 else short(value)


def _round(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    for times in (1, 2, 2.5, 5, 10, 20):
        step = times * size
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            # by division: a product would show as 0.30000000000000004
            return [float(f"{index * step:.12g}") for index in range(first, last + 1)]
    return []


def _decades(low: float, high: float, most: int) -> list[float]:
    found: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = [digit * 10.0**decade for decade in decades for digit in digits]
        found = [each for each in every if low <= each <= high]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]
