"""The numbers of a run on their way from the device to the guard, the log and the screen.

A step's numbers set off for the host when its update is queued, and are looked at before the next
update, when the next forward and backward are queued behind them: so the host never waits for a
device that has nothing to do, and what follows from a step follows at a fixed moment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastbrain.training.books import Books
from fastbrain.training.devices import Device, Fetched
from fastbrain.training.evaluation import Score
from fastbrain.training.exchange import StepNumbers, Wishes
from fastbrain.training.guard import Kind, Verdict
from fastbrain.training.metrics import Row
from fastbrain.training.progress import Console, Pace, Slowdown, Standing
from fastbrain.training.settings import Settings
from fastbrain.training.state import State

# seconds between progress lines, on a terminal and elsewhere
REDRAW_S, PRINT_S = 0.5, 10.0


class _InFlight(NamedTuple):
    step: int
    time_s: float
    learning_rate: float
    numbers: Fetched
    micro_batches: int


class Settled(NamedTuple):
    """A step whose numbers have arrived: steps finished with it, and what it was.

    `micro_losses` are the loss sums of its micro-batches, `wishes` what the ranks asked for in it.
    """

    step: int
    loss: float
    grad_norm: float
    micro_losses: list[float]
    verdict: Verdict
    wishes: Wishes = Wishes()


class Recorder:
    """Collects steps, has them judged, writes metrics rows, prints progress."""

    def __init__(
        self,
        settings: Settings,
        books: Books,
        console: Console,
        device: Device,
        state: State,
    ) -> None:
        self.pace = Pace(state.step)
        self._slowdown = Slowdown()
        self._settings = settings
        self._books = books
        self._console = console
        self._device = device
        self._state = state
        self._in_flight: _InFlight | None = None
        self._rows: list[Row] = []
        # of another rank
        self._peak_bytes = 0
        # the first line comes after the first step, so that a slip shows at once
        self._interval_s = 0.0

    def add(
        self, step: int, rate: float, loss: Tensor, auxiliary: Tensor, norm: Tensor, of: StepNumbers
    ) -> None:
        """Take the numbers of a step just queued; the one before has been settled.

        Args:
            step: steps finished with it.
            rate: its learning rate.
            loss, auxiliary, norm: of the whole step, 0-d each.
            of: what they come from.
        """
        assert self._in_flight is None
        self.pace.tick(step)
        numbers = torch.cat([torch.stack([loss, auxiliary, norm]), of.losses, of.wishes])
        self._in_flight = _InFlight(
            step, self.pace.elapsed_s(), rate, Fetched(numbers), len(of.losses)
        )

    def settle(self) -> Settled | None:
        """Wait for the numbers of the newest step and judge them; None if that was done."""
        if self._in_flight is None:
            return None
        each, self._in_flight = self._in_flight, None
        loss, auxiliary, norm, *rest = each.numbers.values()
        micro_losses, asked = rest[: each.micro_batches], rest[each.micro_batches :]
        wishes = Wishes.of(asked) if asked else Wishes()
        self._peak_bytes = wishes.peak_bytes
        state = self._state
        verdict = state.guard.judge(each.step - 1, loss, norm)
        state.skipped += verdict.kind is Kind.SKIP
        state.loss = loss
        self._rows.append({
            "step": each.step,
            "time_s": round(each.time_s, 3),
            "loss": loss,
            "aux_loss": auxiliary,
            "grad_norm": norm,
            "learning_rate": each.learning_rate,
            "tokens": each.step * self._settings.step_tokens,
            "skipped": state.skipped,
        })  # fmt: skip
        return Settled(each.step, loss, norm, micro_losses, verdict, wishes)

    def due(self) -> bool:
        """Whether it is time for a progress line."""
        return self.pace.since_lap_s() >= self._interval_s

    def flush(self) -> None:
        """Log the settled steps since the last time and show the newest."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        last = rows[-1]
        tokens_per_s = self.pace.lap(last["step"]) * self._settings.step_tokens
        used = max(self._device.peak_bytes(), self._peak_bytes)
        self._books.log(
            {**row, "tokens_per_s": round(tokens_per_s, 1), "peak_bytes": used} for row in rows
        )
        self._console.show(Standing(
            step=last["step"],
            total=self._settings.steps,
            loss=last["loss"],
            val_loss=self._state.val_loss,
            grad_norm=last["grad_norm"],
            learning_rate=last["learning_rate"],
            tokens_per_s=tokens_per_s,
            used_bytes=used,
            device_bytes=self._device.total_bytes,
            skipped=self._state.skipped,
            remaining_s=self.pace.remaining_s(last["step"], self._settings.steps),
        ))  # fmt: skip
        self._interval_s = REDRAW_S if self._console.is_terminal else PRINT_S
        if complaint := self._slowdown.note(self.pace.elapsed_s(), tokens_per_s):
            self._console.say(f"warning: {complaint}")

    def score(self, score: Score, best: bool) -> None:
        """Log and show an evaluation."""
        step = self._state.step
        row: Row = {"step": step, "val_loss": score.loss, "perplexity": score.perplexity}
        row["bits_per_byte"] = score.bits_per_byte
        self._books.log([row])
        line = f"step {step}/{self._settings.steps}  held-out loss {score.loss:.4f}"
        line += f"  perplexity {row['perplexity']:.2f}"
        if score.bits_per_byte is not None:
            line += f"  {score.bits_per_byte:.3f} bits/byte"
        self._console.say(line + ("  (best so far)" if best else ""))

    def go_back(self, state: State) -> None:
        """Go on with the state of an earlier step: a new start in the log."""
        self._in_flight = None
        self._state = state
        self._books.start_anew()
        self.pace.go_back(state.step)
