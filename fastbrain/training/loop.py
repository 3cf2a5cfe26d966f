"""The chapter's loop as a program: steps, checkpoints, evaluations, samples, in one fixed order.

Everything that decides a bit of the result is a function of the step and the settings: the rows
(drawn from the seed and the step), the rate, the split into micro-batches. What depends on the
clock, when a line is printed and when a checkpoint is due, only reads. So a run that is resumed
ends where one that was never interrupted ends.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from fastbrain.errors import Cuda, Io
from fastbrain.lm import TransformerLm
from fastbrain.parallel.ranks import Ranks, hearing
from fastbrain.training import checkpoint, evaluation, following, incidents, metrics
from fastbrain.training.books import Books
from fastbrain.training.conclusion import OUT_OF_MEMORY, conclude, remedies, resume_command
from fastbrain.training.corpus import Corpus
from fastbrain.training.devices import Device
from fastbrain.training.exchange import Wishes, exchanged
from fastbrain.training.guard import Diverged, Kind, Rollback
from fastbrain.training.lock import Lock
from fastbrain.training.progress import Console
from fastbrain.training.recorder import Recorder, Settled
from fastbrain.training.run_dir import RunDir
from fastbrain.training.saving import Saver
from fastbrain.training.settings import Settings
from fastbrain.training.snapshot import Camera
from fastbrain.training.state import State
from fastbrain.training.wanted import Wanted
from fastbrain.training.watchdog import Watchdog


class _RolledBack(Exception):
    """The step in the making is dropped: the run goes on from an earlier one."""

    def __init__(self, decision: Rollback) -> None:
        self.decision = decision


@dataclass
class Trainer:
    """One start of a run: everything is built and loaded, and `run` trains.

    Every rank has one, and all do the same at the same step: what depends on a clock, a signal or a
    file is agreed upon first. The first rank alone, which has the lock, writes and prints.
    """

    run_dir: RunDir
    lock: Lock | None
    settings: Settings
    model: TransformerLm
    corpus: Corpus
    device: Device
    ranks: Ranks
    console: Console
    state: State

    def __post_init__(self) -> None:
        settings, run, say = self.settings, self.run_dir, self.console.say
        leads = self.ranks.leads
        self._total = settings.steps
        self._schedule = settings.schedule()
        self._books = Books(run if leads else None, say)
        self._recorder = Recorder(settings, self._books, self.console, self.device, self.state)
        self._camera = Camera(self.model, self.corpus, self.device, run.run_id, self.ranks)
        self._saver = Saver(say)
        # a hang is of all ranks: each says where its own is
        stacks = "stacks.txt" if leads else f"stacks-{self.ranks.rank}.txt"
        self._watchdog = Watchdog(run.path / stacks, say if leads else self.console.complain)
        pace = self._recorder.pace
        self._wanted = Wanted(settings, self.ranks, run.path, self.device, pace, say)
        self._first_step = self.state.step
        # steps whose checkpoint was begun, and is on the disk
        self._begun = self._committed = self.state.step if self.state.step else -1

    def run(self) -> bool:
        """Train to the end, or until asked to stop; save. Whether the end was reached.

        Raises:
            Diverged: the guard gives up.
            Io: the disk refused the last saves.
            RankLost: another process of the run is gone.
        """
        try:
            with self._wanted, self._watchdog:
                self._repeat_evaluation()
                while self.state.step < self._total:
                    try:
                        self._train_step()
                        if self._after_step(self._wanted.now()):
                            self._settle()
                            break
                    except _RolledBack as back:
                        self._roll_back(back.decision)
                self._recorder.flush()
                self._finish_saving()
                if self.ranks.leads:
                    # a scheduler may repeat its signal while this takes a second
                    counts, say = self.model.parameter_counts(), self.console.say
                    conclude(self.run_dir, self.ranks, self.summary(), counts, say)
        except Exception:
            self._recorder.flush()
            self._saver.abandon()
            raise
        finally:
            self._books.close()
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
        share = len(batches) // self.ranks.size
        own = batches[self.ranks.rank * share : (self.ranks.rank + 1) * share]
        losses, auxiliaries = [], []
        for batch in own:
            routed = batch.valid_tokens() / valid
            with nullcontext() if batch is own[-1] else self.model.no_sync():
                part = self.model.accumulate_step(
                    batch, weight=batch.predicted() / predicted, auxiliary_weight=routed
                )
            losses.append(part.lm_loss_sum)
            auxiliaries.append(part.auxiliary_loss * routed)
        with hearing(self.ranks):
            numbers = exchanged(self.ranks, losses, auxiliaries, self._wanted.to_tell())
        # one after the other: the order decides the last bit, and is that of one process
        loss = reduce(torch.add, numbers.losses.unbind())
        auxiliary = reduce(torch.add, numbers.auxiliaries.unbind())
        # forward and backward are queued, so waiting for the step before costs nothing now
        self._settle()
        norm = self.model.step_clipped(1.0, settings.train.max_norm, loss)
        self.state.step = step + 1
        self._recorder.add(step + 1, rate, loss / predicted, auxiliary, norm, numbers)
        self._watchdog.beat()
        self._saver.check()

    def _settle(self) -> None:
        """Judge the newest step, and do what follows.

        Raises:
            Diverged: the run is to end.
            _RolledBack: the run is to go back.
        """
        settled = self._recorder.settle()
        if settled is None:
            return
        self._wanted.hear(settled.wishes)
        if settled.verdict.kind is Kind.GOOD:
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
        if self.ranks.leads:
            row = incidents.row(settled, self.state.guard, self.corpus, self.settings)
            self._books.note(row)
        if settled.verdict.kind is Kind.SKIP:
            self.console.say(
                f"step {settled.step}: the loss or gradient is not finite; nothing was updated"
            )

    def _roll_back(self, decision: Rollback) -> None:
        self.model.zero_grad()
        self._recorder.flush()
        with self._paused():
            self._saver.wait()
            row = {"kind": "rollback", "step": self.state.step}
            self._books.decide({**row, **decision._asdict()})
            rollbacks = following.rollbacks(self.run_dir, self.ranks)
            if self.ranks.leads:
                self.run_dir.carry_out(rollbacks)
            found = following.newest(self.run_dir, self.ranks, self.console.say)
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

    def _after_step(self, wanted: Wishes) -> bool:
        """Log, save, evaluate, where it is time to; whether the run is to stop."""
        settings, step = self.settings, self.state.step
        last = step == self._total
        every = settings.save.interval_steps
        save = wanted.save or last or (every is not None and step % every == 0)
        evaluate = last or step % settings.eval.interval == 0
        if save or evaluate:
            self._settle()
        if save or evaluate or self._recorder.due():
            self._recorder.flush()
        if save:
            self._save()
        if evaluate:
            self._evaluate()
        return wanted.stop

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """What is not training; all ranks come out of it together, however long one takes."""
        with self._recorder.pace.pause(), self._watchdog.pause():
            yield
            self.ranks.barrier()

    def _save(self) -> None:
        """Begin the checkpoint of this step; training goes on once its copy is made."""
        if self._begun == self.state.step:
            return
        with self._paused():
            self._saver.wait()
            # the others wait for the disk here, where there is time
            self.ranks.barrier()
            write = self._writing()
            if write is not None:
                self._saver.start(write)
        self._begun = self.state.step
        self._wanted.note_save()

    def _writing(self) -> Callable[[], None] | None:
        """Take a snapshot, all ranks together; what writes it, on the first."""
        state, save, lock = self.state, self.settings.save, self.lock
        with hearing(self.ranks):
            snapshot = self._camera.take(self.settings, state)
        if snapshot is None or lock is None:
            return None
        rollback = self.settings.guard.policy == "rollback"
        way_back = state.guard.way_back(state.step) if rollback else None

        def write() -> None:
            lock.check()
            self._books.sync()
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
            if self.ranks.first(lambda: self._committed != self.state.step):
                write = self._writing()
                if write is not None:
                    write()

    def _evaluate(self) -> None:
        settings, step = self.settings, self.state.step
        with self._paused():
            micro = int(settings.train.micro_batch_size)
            score = evaluation.score(self.model, self.corpus, micro, self.ranks)
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
        with self._paused(), hearing(self.ranks):
            whole = self.model.gathered(moments=False) if count else None
            try:
                if whole is not None:
                    if whole is not self.model and self.device.is_cuda:
                        whole.to_cuda(self.device.torch_device.index)
                    first = evaluation.write_samples(whole, self.corpus, count, seed, self._samples)
            except (Io, Cuda) as error:
                self.console.say(f"warning: {error}; training goes on")
        if first is not None:
            self.console.say(f"  sample: {first[:120]}")

    def _repeat_evaluation(self) -> None:
        """Evaluate and sample at the step resumed from, if the last start did not get to it."""
        step = self.state.step
        if not step:
            return
        scores, sampled = self.ranks.first(self._scored)
        for scored, loss in scores:
            if scored <= step and loss is not None:
                self.state.note_score(scored, loss)
        due = step == self._total or step % self.settings.eval.interval == 0
        if due and not any(scored == step for scored, _ in scores):
            self._evaluate()
        elif due and self.settings.eval.samples and not sampled:
            self._sample()

    def _scored(self) -> tuple[list[tuple[int, float | None]], bool]:
        """The evaluations that there are rows of, and whether this step has samples."""
        rows = metrics.read(self.run_dir.metrics)
        scores = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
        return scores, self._samples.exists()

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
        again = resume_command(self.run_dir, self.ranks)
        try:
            committed = self.run_dir.checkpoints()
        except Io as error:
            return str(error)
        if not committed:
            return f"no checkpoint was written yet; begin again: {again}"
        return f"the last checkpoint is {committed[-1].path}; go on from it: {again}"
