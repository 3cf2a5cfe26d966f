"""The numbers of a run on their way from the device to the log and the screen.

A step's loss and norm are left on the device until a line is due; then those of all steps since
the last line come over in one copy. So the host never waits for a step that it has just queued.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastbrain.errors import FastBrainError
from fastbrain.training.devices import Device
from fastbrain.training.evaluation import Score
from fastbrain.training.metrics import Metrics, Row
from fastbrain.training.progress import Console, Pace, Standing
from fastbrain.training.settings import Settings
from fastbrain.training.state import State

# a run whose every gradient is not finite would otherwise go on for its week, changing nothing
MOST_SKIPS = 20

# seconds between progress lines, on a terminal and elsewhere
REDRAW_S, PRINT_S = 0.5, 10.0


class Diverged(FastBrainError):
    """Step after step had a gradient that is not finite."""


class _Pending(NamedTuple):
    step: int
    time_s: float
    learning_rate: float
    numbers: Tensor  # loss, auxiliary loss, gradient norm


class Recorder:
    """Collects steps, writes metrics rows, prints progress; keeps `state` up to date."""

    def __init__(
        self, settings: Settings, metrics: Metrics, console: Console, device: Device, state: State
    ) -> None:
        self.pace = Pace(state.step)
        self._settings = settings
        self._metrics = metrics
        self._console = console
        self._device = device
        self._state = state
        self._pending: list[_Pending] = []
        # the first line comes after the first step, so that a slip shows at once
        self._interval_s = 0.0

    def add(self, step: int, rate: float, numbers: Tensor) -> None:
        """Take the numbers of a step just queued: (3,) loss, auxiliary loss, gradient norm."""
        self.pace.tick(step)
        self._pending.append(_Pending(step, self.pace.elapsed_s(), rate, numbers))

    def due(self) -> bool:
        """Whether it is time for a progress line."""
        return self.pace.since_lap_s() >= self._interval_s

    def flush(self) -> None:
        """Log the steps since the last time and show the newest.

        Raises:
            Diverged: the last `MOST_SKIPS` steps all had a gradient that is not finite.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        numbers = torch.stack([each.numbers for each in pending]).tolist()
        step_tokens = self._settings.step_tokens
        tokens_per_s = self.pace.lap(self._state.step) * step_tokens
        used = self._device.peak_bytes()
        rows: list[Row] = []
        for each, (loss, auxiliary, norm) in zip(pending, numbers, strict=True):
            self._state.count(norm)
            rows.append({
                "step": each.step,
                "time_s": round(each.time_s, 3),
                "loss": loss,
                "aux_loss": auxiliary,
                "grad_norm": norm,
                "learning_rate": each.learning_rate,
                "tokens": each.step * step_tokens,
                "tokens_per_s": round(tokens_per_s, 1),
                "peak_bytes": used,
                "skipped": self._state.skipped,
            })  # fmt: skip
        self._metrics.append(rows)
        self._state.loss = loss
        self._console.show(Standing(
            step=each.step,
            total=self._settings.steps,
            loss=loss,
            val_loss=self._state.val_loss,
            grad_norm=norm,
            learning_rate=each.learning_rate,
            tokens_per_s=tokens_per_s,
            used_bytes=used,
            device_bytes=self._device.total_bytes,
            skipped=self._state.skipped,
            remaining_s=self.pace.remaining_s(each.step, self._settings.steps),
        ))  # fmt: skip
        self._interval_s = REDRAW_S if self._console.is_terminal else PRINT_S
        if self._state.consecutive_skips >= MOST_SKIPS:
            raise Diverged(
                f"the gradient was not finite in the last {self._state.consecutive_skips} steps, "
                "so none of them changed the model; resume with a lower train.learning_rate in a "
                "new run, or look at the text that these steps read"
            )

    def score(self, score: Score, best: bool) -> None:
        """Log and show an evaluation."""
        step = self._state.step
        row: Row = {"step": step, "val_loss": score.loss, "perplexity": score.perplexity}
        row["bits_per_byte"] = score.bits_per_byte
        self._metrics.append([row])
        line = f"step {step}/{self._settings.steps}  held-out loss {score.loss:.4f}"
        line += f"  perplexity {row['perplexity']:.2f}"
        if score.bits_per_byte is not None:
            line += f"  {score.bits_per_byte:.3f} bits/byte"
        self._console.say(line + ("  (best so far)" if best else ""))
