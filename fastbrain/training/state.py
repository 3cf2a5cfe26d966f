"""What a run carries from step to step beside weights and moments."""

import math
from dataclasses import dataclass, field

from fastbrain.training.guard import Guard


@dataclass
class State:
    """Counters and results; losses are nats a token.

    Attributes:
        step: steps finished, skipped ones included; drives rate and rows.
        skipped: steps whose loss or gradient was not finite, so that nothing was updated.
        loss: training loss of the newest step that was fetched.
        val_loss: newest held-out loss.
        best_loss: lowest held-out loss, and `best_step` where it was.
        guard: what judges the steps.
    """

    step: int = 0
    skipped: int = 0
    loss: float = math.nan
    val_loss: float | None = None
    best_loss: float = math.inf
    best_step: int | None = None
    guard: Guard = field(default_factory=Guard)

    def note_score(self, step: int, loss: float) -> bool:
        """Note a held-out loss; whether it is the best so far."""
        self.val_loss = loss
        if not loss < self.best_loss:
            return False
        self.best_loss, self.best_step = loss, step
        return True
