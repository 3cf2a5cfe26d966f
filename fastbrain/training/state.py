"""What a run carries from step to step beside weights and moments."""

import math
from dataclasses import dataclass


@dataclass
class State:
    """Counters and results; losses are nats a token.

    Attributes:
        step: steps finished, skipped ones included; drives rate and rows.
        skipped: steps whose gradient was not finite, so that nothing was updated.
        consecutive_skips: how many of them the run ends with.
        loss: training loss of the newest step that was fetched.
        val_loss: newest held-out loss.
        best_loss: lowest held-out loss, and `best_step` where it was.
    """

    step: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    loss: float = math.nan
    val_loss: float | None = None
    best_loss: float = math.inf
    best_step: int | None = None

    def count(self, grad_norm: float) -> None:
        """Note the gradient norm of the next step: one that is not finite was a skip."""
        if math.isfinite(grad_norm):
            self.consecutive_skips = 0
        else:
            self.skipped += 1
            self.consecutive_skips += 1

    def note_score(self, step: int, loss: float) -> bool:
        """Note a held-out loss; whether it is the best so far."""
        self.val_loss = loss
        if not loss < self.best_loss:
            return False
        self.best_loss, self.best_step = loss, step
        return True
