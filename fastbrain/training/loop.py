"""The chapter's loop as a program: steps, checkpoints, evaluations, samples, in one fixed order.

Everything that decides a bit of the result is a function of the step and the settings: the rows
(drawn from the seed and the step), the rate, the split into micro-batches. What depends on the
clock, when a line is printed and when a checkpoint is due, only reads. So a run that is resumed
ends where one that was never interrupted ends.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastbrain.errors import Io
from fastbrain.lm import TransformerLm
from fastbrain.tokens.token_batch import TokenBatch
from fastbrain.tokens.token_file import TokenFile
from fastbrain.training import chart, checkpoint, evaluation, metrics, rules
from fastbrain.training.data import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.interrupts import Interrupts
from fastbrain.training.progress import Console, short_time
from fastbrain.training.recorder import Recorder
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings
from fastbrain.training.state import State


def step_batches(
    tokens: TokenFile, step: int, rows: int, micro: int, seq_len: int
) -> Iterator[TokenBatch]:
    """The micro-batches of a step counted from 0: `rows` windows, cut in order.

    Which windows depends on the file's seed, the step and `rows` only; `micro` divides `rows`.
    """
    windows = tokens.windows(tokens.offsets(step, rows, seq_len), seq_len)
    for first in range(0, rows, micro):
        yield windows.slice(first, first + micro)


@dataclass
class Trainer:
    """One start of a run: everything is built and loaded, and `run` trains."""

    run_dir: RunDir
    settings: Settings
    model: TransformerLm
    corpus: Corpus
    device: Device
    console: Console
    state: State

    def __post_init__(self) -> None:
        settings = self.settings
        self._total = settings.steps
        self._schedule = settings.schedule()
        self._metrics = metrics.Metrics(self.run_dir.metrics, self.console.say)
        self._recorder = Recorder(settings, self._metrics, self.console, self.device, self.state)
        self._saved_step = self.state.step
        self._last_save_s = 0.0

    def run(self) -> bool:
        """Train to the end, or until asked to stop; save. Whether the end was reached."""
        limit = self.settings.train.max_time
        limit_s = math.inf if limit is None else rules.seconds(limit)
        with Interrupts(self.console.say) as interrupts:
            self._repeat_evaluation()
            while self.state.step < self._total:
                self._train_step()
                self._after_step()
                if interrupts.requested or self._recorder.pace.elapsed_s() >= limit_s:
                    break
            self._recorder.flush()
            self._save()
        self._conclude()
        return self.state.step == self._total

    def _train_step(self) -> None:
        settings, step = self.settings, self.state.step
        rows, seq_len = settings.train.global_batch_size, settings.data.seq_len
        micro = int(settings.train.micro_batch_size)
        rate = self._schedule.rate(step)
        self.model.set_learning_rate(rate)
        # the count is known before the forward: a step's loss is one sum over one count,
        # however it is split
        predicted = rows * (seq_len - 1)
        loss = auxiliary = torch.zeros((), device=self.device.torch_device)
        for batch in step_batches(self.corpus.train, step, rows, micro, seq_len):
            share = batch.predicted() / predicted
            part = self.model.accumulate_step(batch, weight=share)
            loss = loss + part.lm_loss_sum
            auxiliary = auxiliary + part.auxiliary_loss * share
        norm = self.model.step_clipped(1.0, settings.train.max_norm)
        self.state.step = step + 1
        self._recorder.add(step + 1, rate, torch.stack([loss / predicted, auxiliary, norm]))

    def _after_step(self) -> None:
        settings, step = self.settings, self.state.step
        last = step == self._total
        every, every_s = settings.save.interval_steps, settings.save_every_s
        save = last or (every is not None and step % every == 0)
        if every_s is not None:
            save = save or self._recorder.pace.elapsed_s() - self._last_save_s >= every_s
        evaluate = last or step % settings.eval.interval == 0
        if save or evaluate or self._recorder.due():
            self._recorder.flush()
        if save:
            self._save()
        if evaluate:
            self._evaluate()

    def _save(self) -> None:
        if self._saved_step == self.state.step:
            return

        def write(directory: Path) -> None:
            checkpoint.write(
                directory, self.model, self.corpus, self.settings, self.state, self.device,
                self.run_dir.run_id,
            )  # fmt: skip

        with self._recorder.pace.pause():
            self._metrics.sync()
            self.run_dir.commit(self.state.step, write)
            save = self.settings.save
            self.run_dir.retain(save.keep, save.keep_every, self.state.best_step)
        self._saved_step = self.state.step
        self._last_save_s = self._recorder.pace.elapsed_s()

    def _evaluate(self) -> None:
        settings, step = self.settings, self.state.step
        with self._recorder.pace.pause():
            micro = int(settings.train.micro_batch_size)
            score = evaluation.score(self.model, self.corpus, micro, settings.data.seq_len)
            best = self.state.note_score(step, score.loss)
            self._recorder.score(score, best)
            if best:
                self._save()
            path = self.run_dir.samples / f"step-{step:08d}.txt"
            samples, seed = settings.eval.samples, settings.train.seed
            try:
                first = evaluation.write_samples(self.model, self.corpus, samples, seed, path)
            except Io as error:
                first = None
                self.console.say(f"warning: {error}; training goes on")
        if first is not None:
            self.console.say(f"  sample: {first[:120]}")

    def _repeat_evaluation(self) -> None:
        """Run the evaluation of the step resumed from, if the last start did not get to it."""
        step = self.state.step
        if not step:
            return
        scores = [row for row in metrics.read(self.run_dir.metrics) if "val_loss" in row]
        for row in scores:
            if row["step"] <= step and row["val_loss"] is not None:
                self.state.note_score(row["step"], row["val_loss"])
        due = step == self._total or step % self.settings.eval.interval == 0
        if due and not any(row["step"] == step for row in scores):
            self._evaluate()

    def summary(self) -> dict[str, Any]:
        """The end of this start in numbers; losses are nats a token, NaN is None."""
        state = self.state
        return {
            "run": str(self.run_dir.path),
            "step": state.step,
            "steps": self._total,
            "tokens": state.step * self.settings.step_tokens,
            "loss": state.loss if math.isfinite(state.loss) else None,
            "val_loss": state.val_loss,
            "best_val_loss": None if state.best_step is None else state.best_loss,
            "best_step": state.best_step,
            "skipped": state.skipped,
            "checkpoint": str(self.run_dir.checkpoints()[-1].path),
            "time_s": round(self._recorder.pace.elapsed_s(), 3),
        }

    def way_back(self) -> str:
        """One sentence for a run that failed: what is left, and how to go on."""
        committed = self.run_dir.checkpoints()
        if not committed:
            return (
                f"no checkpoint was written yet; begin again: fastbrain resume {self.run_dir.path}"
            )
        return (
            f"the last checkpoint is {committed[-1].path}; go on from it: "
            f"fastbrain resume {self.run_dir.path}"
        )

    def _conclude(self) -> None:
        rows = metrics.read(self.run_dir.metrics)
        picture = self.run_dir.path / "loss.png"
        title = f"{self.run_dir.path.name}: {self.model.parameter_counts()}"
        missing: str | None
        try:
            missing = chart.draw(rows, picture, title)
        except Io as error:
            missing = str(error)
        summary, say = self.summary(), self.console.say
        took = short_time(summary["time_s"])
        say("")
        done = "done" if summary["step"] == self._total else "stopped"
        say(
            f"{done}: {summary['step']} of {self._total} steps, {summary['tokens']:,} tokens, "
            f"{took} since this start"
        )
        if summary["loss"] is not None:
            say(f"  training loss  {summary['loss']:.4f}")
        if summary["val_loss"] is not None:
            say(
                f"  held-out loss  {summary['val_loss']:.4f}, the best "
                f"{summary['best_val_loss']:.4f} at step {summary['best_step']}"
            )
        say(f"  checkpoint     {summary['checkpoint']}")
        say(f"  samples        {self.run_dir.samples}")
        say(f"  loss curve     {picture}" if missing is None else f"  {missing}")
        if summary["step"] < self._total:
            say(f"  go on with     fastbrain resume {self.run_dir.path}")
