"""Bad steps: which ones are, and what follows. Pure functions of numbers, so a resume repeats them.

A step whose loss or gradient norm is not a finite number has changed nothing: the device decided
that before the update. One whose loss or norm is far above those of the last steps is a spike; it
was clipped like any other, and is noted. Only applied updates enter the window that "far above" is
measured against, so one NaN costs one step and not the statistics of the next hundred.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple, Self

from fastbrain.errors import FastBrainError

# applied updates that a spike is measured against, and how many there must be
WINDOW, ENOUGH = 128, 32
# a spike is this many standard deviations above the median, estimated by the median absolute
# deviation (1.4826 of it is one deviation of a normal distribution), and a tenth of the median
DEVIATIONS, TO_DEVIATION, LEAST_SHARE = 8, 1.4826, 0.10
# a run whose every gradient is not finite would otherwise go on for its week, changing nothing
MOST_SKIPS = 20
# what makes `rollback` go back, how far before the first bad step, and how often
SKIPS, SPIKES, MARGIN, MOST_ROLLBACKS = 3, 50, 8, 3


class Diverged(FastBrainError):
    """Training cannot go on in a way that helps."""


class Kind(StrEnum):
    """What a step was."""

    GOOD = "good"
    SPIKE = "spike"
    SKIP = "skip"


class Rollback(NamedTuple):
    """Attempts `first` to `last` are given up; their rows are passed over from `first` on."""

    first: int
    last: int

    @property
    def passed_over(self) -> tuple[int, int]:
        """From which step on how many rows of steps are passed over."""
        return self.first, self.last - self.first + 1


class Verdict(NamedTuple):
    """What a step was, the limits it was held to (None: too few steps yet), and what follows."""

    kind: Kind
    loss_limit: float | None
    norm_limit: float | None
    rollback: Rollback | None = None
    stop: str | None = None


@dataclass
class Guard:
    """Judges step after step.

    Attributes:
        policy: "skip", "rollback" or "stop".
        losses, norms: of the newest applied updates.
        skips, spikes: how many the run ends with in a row.
        data_skips: (step, count): from that step on, so many rows of steps are passed over.
    """

    policy: str = "skip"
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    skips: int = 0
    spikes: int = 0
    data_skips: list[tuple[int, int]] = field(default_factory=list)

    def data_step(self, step: int) -> int:
        """Whose rows a step reads, both counted from 0."""
        return step + sum(count for first, count in self.data_skips if first <= step)

    def way_back(self, steps: int) -> int:
        """The latest step that a rollback decided from now on may have to reload."""
        return max(steps - max(self.skips, self.spikes) - MARGIN, 0)

    def judge(self, step: int, loss: float, norm: float) -> Verdict:
        """Take the numbers of a step counted from 0, in order; what follows from them.

        Args:
            step: the attempt.
            loss, norm: its mean loss, and the norm of its gradient before clipping; the update
                was applied if both are finite.
        """
        limits = _limit(self.losses), _limit(self.norms)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skips, self.spikes = self.skips + 1, 0
            return Verdict(Kind.SKIP, *limits, *self._after_skip(step))
        above = [
            limit is not None and value > limit
            for value, limit in zip((loss, norm), limits, strict=True)
        ]
        self.losses.append(loss)
        self.norms.append(norm)
        self.skips = 0
        self.spikes = self.spikes + 1 if any(above) else 0
        if not self.spikes:
            return Verdict(Kind.GOOD, *limits)
        if self.policy == "rollback" and self.spikes >= SPIKES:
            return Verdict(Kind.SPIKE, *limits, *self._back(step, self.spikes))
        return Verdict(Kind.SPIKE, *limits)

    def _after_skip(self, step: int) -> tuple[Rollback | None, str | None]:
        if self.policy == "stop":
            return None, 'its loss or gradient is not finite, and guard.policy is "stop"'
        if self.policy == "rollback" and self.skips >= SKIPS:
            return self._back(step, self.skips)
        if self.skips >= MOST_SKIPS:
            return None, (
                f"the gradient was not finite in the last {self.skips} steps, so none of them "
                "changed the model"
            )
        return None, None

    def _back(self, step: int, bad: int) -> tuple[Rollback | None, str | None]:
        if len(self.data_skips) >= MOST_ROLLBACKS:
            return None, f"it went wrong again after {MOST_ROLLBACKS} rollbacks"
        return Rollback(max(step - bad + 1 - MARGIN, 0), step), None

    def document(self) -> dict[str, Any]:
        """Its state for a checkpoint; floats survive JSON to the bit."""
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "consecutive_skips": self.skips,
            "consecutive_spikes": self.spikes,
            "data_skips": [list(each) for each in self.data_skips],
            "rollbacks": len(self.data_skips),
        }

    @classmethod
    def restored(
        cls, policy: str, recorded: Mapping[str, Any], data_skips: list[tuple[int, int]]
    ) -> Self:
        """The guard of a checkpoint's `document`, with all rollbacks decided up to now."""
        return cls(
            policy,
            deque(recorded["losses"], WINDOW),
            deque(recorded["norms"], WINDOW),
            recorded["consecutive_skips"],
            recorded["consecutive_spikes"],
            data_skips,
        )


def _limit(values: deque[float]) -> float | None:
    if len(values) < ENOUGH:
        return None
    middle = median(values)
    deviation = TO_DEVIATION * median(abs(value - middle) for value in values)
    return middle + max(DEVIATIONS * deviation, LEAST_SHARE * middle)
