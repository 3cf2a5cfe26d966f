"""The learning rate as a pure function of the step: nothing to register, nothing to save."""

import math
from dataclasses import dataclass, replace
from typing import Self

from numpy import float32

from fastbrain.errors import InvalidConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a cosine down to `lowest` times the peak, held for ever."""

    peak: float
    warmup: int
    total: int
    lowest: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise InvalidConfig(f"peak must be a finite rate of at least 0, got {self.peak}")
        for name in ("warmup", "total"):
            if getattr(self, name) < 0:
                raise InvalidConfig(
                    f"{name} must be a number of steps of at least 0, got {getattr(self, name)}"
                )
        if not 0 <= self.lowest <= 1:
            raise InvalidConfig(
                f"floor must be a fraction of the peak from 0 to 1, got {self.lowest}"
            )

    @classmethod
    def warmup_cosine(cls, peak: float, warmup: int, total: int) -> Self:
        """A schedule over `total` steps, counted from 0; the first `warmup` of them rise.

        Args:
            peak: the highest rate, reached at step `warmup - 1`.
            warmup: steps of linear rise; step 0 already has rate `peak / warmup`.
            total: steps until the floor is reached; later steps stay there.

        Raises:
            InvalidConfig: a negative or non-finite argument.
        """
        return cls(peak, warmup, total)

    def floor(self, fraction: float) -> Self:
        """The same schedule ending at `fraction` of the peak (0.1 unless told)."""
        return replace(self, lowest=fraction)

    def rate(self, step: int) -> float:
        """The learning rate of a step counted from 0: a 32-bit float, in its shortest decimal."""
        if step < 0:
            raise InvalidConfig(f"step must be at least 0, got {step}")
        # every operation rounds to 32 bits, because the crate's do
        peak, lowest = float32(self.peak), float32(self.lowest)
        decay = self.total - self.warmup
        if step < self.warmup:
            rate = peak * float32(step + 1) / float32(self.warmup)
        elif decay <= 0:
            rate = peak * lowest
        else:
            progress = min(float32(step - self.warmup) / float32(decay), float32(1))
            cosine = float32(math.cos(float32(math.pi) * progress))
            rate = peak * (lowest + (1 - lowest) * float32(0.5) * (1 + cosine))
        return float(str(rate))
