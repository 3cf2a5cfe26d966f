"""The chapter's loop as a program: steps, checkpoints, evaluations, samples, in one fixed order.

Everything that decides a bit of the result is a function of the step and the settings: the rows
(drawn from the seed and the step), the rate, the split into micro-batches. What depends on the
clock, when a line is printed and when a checkpoint is due, only reads. So a run that is resumed
ends where one that was never interrupted ends.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastbrain.errors import Io
from fastbrain.lm import TransformerLm
from fastbrain.training import checkpoint, evaluation, guard_log, incidents, metrics, rules
from fastbrain.training.conclusion import OUT_OF_MEMORY, conclude, remedies
from fastbrain.training.corpus import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.guard import Diverged, Kind, Rollback
from fastbrain.training.lock import Lock
from fastbrain.training.progress import Console
from fastbrain.training.recorder import Recorder, Settled
from fastbrain.training.requests import Requests
from fastbrain.training.run_dir import RunDir
from fastbrain.training.saving import Saver
from fastbrain.training.settings import Settings
from fastbrain.training.sinks import TensorBoard
from fastbrain.training.snapshot import Camera
from fastbrain.training.state import State
from fastbrain.training.watchdog import Watchdog


class _RolledBack(Exception):
    """The step in the making is dropped: the run goes on from an earlier one."""

    def __init__(self, decision: Rollback) -> None:
        self.decision = decision


@dataclass
class Trainer:
    """One start of a run: everything is built and loaded, and `run` trains."""

    run_dir: RunDir
    lock: Lock
    settings: Settings
    model: TransformerLm
    corpus: Corpus
    device: Device
    console: Console
    state: State

    def __post_init__(self) -> None:
        settings, run, say = self.settings, self.run_dir, self.console.say
        self._total = settings.steps
        self._schedule = settings.schedule()
        self._metrics = metrics.Metrics(run.metrics, say)
        self._guard_log = guard_log.GuardLog(run.guard_log, say)
        self._board = TensorBoard(run.path / "tensorboard", say)
        self._recorder = Recorder(
            settings, self._metrics, self._board, self.console, self.device, self.state
        )
        self._camera = Camera(self.model, self.corpus, self.device, run.run_id)
        self._saver = Saver(say)
        self._watchdog = Watchdog(run.path / "stacks.txt", say)
        self._first_step = self.state.step
        # steps whose checkpoint was begun, and is on the disk
        self._begun = self._committed = self.state.step if self.state.step else -1
        self._last_save_s = 0.0

    def run(self) -> bool:
        """Train to the end, or until asked to stop; save. Whether the end was reached.

        Raises:
            Diverged: the guard gives up.
            Io: the disk refused the last saves.
        """
        limit = self.settings.train.max_time
        limit_s = math.inf if limit is None else rules.seconds(limit)
        try:
            with Requests(self.run_dir.path, self.console.say) as requests, self._watchdog:
                self._repeat_evaluation()
                while self.state.step < self._total:
                    try:
                        self._train_step()
                        self._after_step(requests.save())
                        if requests.stop() or self._recorder.pace.elapsed_s() >= limit_s:
                            self._settle()
                            break
                    except _RolledBack as back:
                        self._roll_back(back.decision)
                self._recorder.flush()
                self._finish_saving()
                # a scheduler may repeat its signal while this takes a second
                counts, say = self.model.parameter_counts(), self.console.say
                conclude(self.run_dir, self.summary(), counts, say)
        except Exception:
            self._recorder.flush()
            self._saver.abandon()
            raise
        finally:
            self._board.close()
        return self.state.step >= self._total

    def _train_step(self) -> None:
        settings, step = self.settings, self.state.step
        rows, micro = settings.train.global_batch_size, int(settings.train.micro_batch_size)
        rate = self._schedule.rate(step)
        self.model.set_learning_rate(rate)
        data_step = self.state.guard.data_step(step)
        batches = list(self.corpus.step_batches(data_step, rows, micro))
        # the counts are known before the forward: a step's loss is one sum over one count,
        # however it is split
        predicted = sum(batch.predicted() for batch in batches)
        valid = sum(batch.valid_tokens() for batch in batches)
        loss = auxiliary = torch.zeros((), device=self.device.torch_device)
        parts = []
        for batch in batches:
            routed = batch.valid_tokens() / valid
            part = self.model.accumulate_step(
                batch, weight=batch.predicted() / predicted, auxiliary_weight=routed
            )
            loss = loss + part.lm_loss_sum
            auxiliary = auxiliary + part.auxiliary_loss * routed
            parts.append(part.lm_loss_sum)
        # forward and backward are queued, so waiting for the step before costs nothing now
        self._settle()
        norm = self.model.step_clipped(1.0, settings.train.max_norm, loss)
        self.state.step = step + 1
        numbers = torch.stack([loss / predicted, auxiliary, norm, *parts])
        self._recorder.add(step + 1, rate, numbers)
        self._watchdog.beat()
        self._saver.check()

    def _settle(self) -> None:
        """Judge the newest step, and do what follows.

        Raises:
            Diverged: the run is to end.
            _RolledBack: the run is to go back.
        """
        settled = self._recorder.settle()
        if settled is None or settled.verdict.kind is Kind.GOOD:
            return
        self._note(settled)
        if settled.verdict.stop is not None:
            raise Diverged(
                f"step {settled.step}: {settled.verdict.stop}; begin another run with a lower "
                f"train.learning_rate, or look at the text that {self.run_dir.guard_log} shows"
            )
        if settled.verdict.rollback is not None:
            raise _RolledBack(settled.verdict.rollback)

    def _note(self, settled: Settled) -> None:
        row = incidents.row(settled, self.state.guard, self.corpus, self.settings)
        self._guard_log.note({"start": self._metrics.start, **row})
        if settled.verdict.kind is Kind.SKIP:
            self.console.say(
                f"step {settled.step}: the loss or gradient is not finite; nothing was updated"
            )

    def _roll_back(self, decision: Rollback) -> None:
        self.model.zero_grad()
        self._recorder.flush()
        with self._paused():
            self._saver.wait()
            row = {"start": self._metrics.start, "kind": "rollback", "step": self.state.step}
            self._guard_log.decide({**row, **decision._asdict()})
            rollbacks = guard_log.rollbacks(self.run_dir.guard_log)
            self.run_dir.carry_out(rollbacks)
            found = self.run_dir.newest(self.console.say)
            self.state = checkpoint.restore(
                found, self.model, self.corpus, self.settings, rollbacks
            )
            self._recorder.go_back(self.state)
            self._begun = self._committed = self.state.step if found else -1
            self.console.say(
                f"warning: rolled back to step {self.state.step}; the rows of steps "
                f"{decision.first + 1} to {decision.last + 1} are passed over from now on"
            )
            self._repeat_evaluation()

    def _after_step(self, wanted: bool) -> None:
        settings, step = self.settings, self.state.step
        last = step == self._total
        every, every_s = settings.save.interval_steps, settings.save_every_s
        save = wanted or last or (every is not None and step % every == 0)
        if every_s is not None:
            save = save or self._recorder.pace.elapsed_s() - self._last_save_s >= every_s
        evaluate = last or step % settings.eval.interval == 0
        if save or evaluate:
            self._settle()
        if save or evaluate or self._recorder.due():
            self._recorder.flush()
        if save:
            self._save()
        if evaluate:
            self._evaluate()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self._recorder.pace.pause(), self._watchdog.pause():
            yield

    def _save(self) -> None:
        """Begin the checkpoint of this step; training goes on once its copy is made."""
        if self._begun == self.state.step:
            return
        with self._paused():
            self._saver.wait()
            self._saver.start(self._writing())
        self._begun = self.state.step
        self._last_save_s = self._recorder.pace.elapsed_s()

    def _writing(self) -> Callable[[], None]:
        state, save = self.state, self.settings.save
        snapshot = self._camera.take(self.settings, state)
        rollback = self.settings.guard.policy == "rollback"
        way_back = state.guard.way_back(state.step) if rollback else None

        def write() -> None:
            self.lock.check()
            self._metrics.sync()
            self.run_dir.commit(snapshot.step, snapshot.write)
            self._committed = snapshot.step
            try:
                # looked up now: an evaluation since may have made this step the best
                self.run_dir.retain(
                    save.keep, save.keep_every, state.best_step, self.console.say, way_back
                )
            except Io as error:
                self.console.say(f"warning: {error}; old checkpoints stay")

        return write

    def _finish_saving(self) -> None:
        """Make sure that the last step is on the disk.

        Raises:
            Io: it cannot be written.
        """
        with self._paused():
            self._saver.wait()
            if self._committed != self.state.step:
                self._writing()()

    def _evaluate(self) -> None:
        settings, step = self.settings, self.state.step
        with self._paused():
            micro = int(settings.train.micro_batch_size)
            score = evaluation.score(self.model, self.corpus, micro)
            best = self.state.note_score(step, score.loss)
            self._recorder.score(score, best)
            if best:
                self._save()
        self._sample()

    @property
    def _samples(self) -> Path:
        return self.run_dir.samples / f"step-{self.state.step:08d}.txt"

    def _sample(self) -> None:
        count, seed, first = self.settings.eval.samples, self.settings.train.seed, None
        try:
            with self._paused():
                first = evaluation.write_samples(
                    self.model, self.corpus, count, seed, self._samples
                )
        except Io as error:
            self.console.say(f"warning: {error}; training goes on")
        if first is not None:
            self.console.say(f"  sample: {first[:120]}")

    def _repeat_evaluation(self) -> None:
        """Evaluate and sample at the step resumed from, if the last start did not get to it."""
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
        elif due and self.settings.eval.samples and not self._samples.exists():
            self._sample()

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

    def failure(self, error: Exception) -> str:
        """What to say of an error that ended the run, with what would help where that is known."""
        said = str(error)
        full = isinstance(error.__cause__, torch.OutOfMemoryError)
        if full and self.state.step == self._first_step:
            ways = remedies(self.settings)
            said = "\n".join([OUT_OF_MEMORY, *ways, f"({error.__cause__})"]) if ways else said
        return f"{said}\n{self.way_back()}"

    def way_back(self) -> str:
        """One sentence for a run that failed: what is left, and how to go on."""
        run = self.run_dir.path
        try:
            committed = self.run_dir.checkpoints()
        except Io as error:
            return str(error)
        if not committed:
            return f"no checkpoint was written yet; begin again: fastbrain resume {run}"
        return f"the last checkpoint is {committed[-1].path}; go on from it: fastbrain resume {run}"
