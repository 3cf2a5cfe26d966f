"""What the ranks of a run tell each other in every step: its losses, and whether to stop or save.

It is one sum over the ranks, queued behind the step's last backward. Every micro-batch of the step
has a place of its own in it, so that the losses of all ranks are added in the order that one
process would add them in, and so that one which is not a number still says whose it is.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fastbrain.parallel.ranks import Ranks

_MIB = 2**20


class Wishes(NamedTuple):
    """What is wanted after a step, by one rank or by any, and the most memory that one has used."""

    stop: bool = False
    save: bool = False
    peak_bytes: int = 0

    def tensor(self, ranks: Ranks) -> Tensor:
        """Numbers that may be summed over the ranks, FP32."""
        # in MiB FP32 holds them exactly
        peaks = [0] * ranks.size
        peaks[ranks.rank] = -(-self.peak_bytes // _MIB)
        return torch.tensor([self.stop, self.save, *peaks], dtype=torch.float32)

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """What such a sum says."""
        stop, save, *peaks = values
        return cls(stop > 0, save > 0, int(max(peaks)) * _MIB)

    def joined(self, other: "Wishes") -> "Wishes":
        """Both."""
        return Wishes(self.stop or other.stop, self.save or other.save, other.peak_bytes)


class StepNumbers(NamedTuple):
    """A step's numbers, on the ranks' devices.

    Attributes:
        losses: (micro-batches of the step), the sum of each.
        auxiliaries: (micro-batches of the step), each one's share of the auxiliary loss.
        wishes: to be read by `Wishes.of`; empty where there is one process, which knows its own.
    """

    losses: Tensor
    auxiliaries: Tensor
    wishes: Tensor


def exchanged(
    ranks: Ranks, losses: Sequence[Tensor], auxiliaries: Sequence[Tensor], wishes: Wishes
) -> StepNumbers:
    """The numbers of all ranks, from those of this one's micro-batches (0-d FP32 each)."""
    own = torch.stack([*losses, *auxiliaries]).view(2, -1)
    if ranks.size == 1:
        return StepNumbers(own[0], own[1], own.new_empty(0))
    share = own.shape[1]
    numbers = own.new_zeros(2, ranks.size * share)
    numbers[:, ranks.rank * share : (ranks.rank + 1) * share] = own
    asked = wishes.tensor(ranks).to(own.device, non_blocking=True)
    found = ranks.sum(torch.cat([numbers.flatten(), asked]))
    count = numbers.shape[1]
    return StepNumbers(found[:count], found[count : 2 * count], found[2 * count :])
