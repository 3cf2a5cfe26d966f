"""The trials of damaged checkpoints: done one after the other to one run, and judged."""

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.campaigns import damage, runs
from bench.campaigns.damage import Sources
from bench.campaigns.runs import Lost
from bench.campaigns.trial import CORRUPT, FOREIGN, INTACT, MANIFEST, NEWER, Trial
from fastbrain.errors import FastBrainError
from fastbrain.training.run_dir import RunDir


@dataclass
class Row:
    """What came of the trials of a kind.

    Attributes:
        fate: what had to become of the checkpoint.
        right: trials in which it did.
        stopped: of those, refused as of a newer format where an older one would have been used.
        resumed: runs that went on from the damage to the bits of an undisturbed one.
        ms: for finding the newest intact checkpoint, damaged one included.
    """

    fate: str
    trials: int = 0
    right: int = 0
    stopped: int = 0
    resumed: int = 0
    ms: list[float] = field(default_factory=list)


class Campaign:
    """Damages the newest checkpoint of a run, which is as it was after each trial.

    Args:
        run: the directory of a finished run that has two checkpoints at least.
        foreign: that of another one, of the same shape and length.
        resume: goes on with a run to its end; called once for every kind of damage.
    """

    def __init__(
        self, run: Path, foreign: Path, resume: Callable[[Path], object] | None = None
    ) -> None:
        self._run, self._resume = run, resume
        self._older, self._newest = RunDir.open(run).checkpoints()[-2:]
        self._aside = self._newest.path.with_name(f"{self._newest.path.name}.corrupt")
        whole = run.with_name(f"{run.name}-whole")
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(run, whole)
        self._whole, self._expected = whole, runs.end(whole)
        at = Path("checkpoints", self._newest.path.name)
        self._sources = Sources(
            whole / at, whole / "checkpoints" / self._older.path.name, foreign / at
        )
        self.rows: dict[str, Row] = {}
        self.failures: list[str] = []

    def run(self, count: int, seed: int, say: Callable[[str], object]) -> None:
        """Do every trial, `count` flipped bits among them."""
        files = len(list(self._sources.newest.iterdir()))
        for trial in damage.trials(self._sources, math.ceil(count / files), seed):
            row = self.rows.setdefault(trial.kind, Row(trial.fate))
            row.trials += 1
            try:
                self._try(trial, row)
                row.right += 1
                if self._resume is not None and trial.fate == CORRUPT and not row.resumed:
                    self._go_on(trial)
                    row.resumed += 1
            except Lost as error:
                self.failures.append(f"{trial.kind} ({trial.names}): {error}")
                say(self.failures[-1])
            self._restore()

    def result(self) -> dict[str, Any]:
        """All of it as numbers; the controls, where nothing is wrong, are no damage."""
        real = [row for row in self.rows.values() if row.fate != INTACT]
        times = sorted(ms for row in real for ms in row.ms)
        return {
            "trials": sum(row.trials for row in real),
            "found": sum(row.right for row in real),
            "resumed": sum(row.resumed for row in real),
            "fall_back_ms": {"median": statistics.median(times), "longest": times[-1]},
            "checkpoint_bytes": sum(p.stat().st_size for p in self._sources.newest.iterdir()),
            "kinds": {
                kind: {
                    "fate": row.fate,
                    "trials": row.trials,
                    "right": row.right,
                    "stopped": row.stopped,
                    "resumed": row.resumed,
                    "longest_ms": round(max(row.ms, default=0.0), 2),
                }
                for kind, row in self.rows.items()
            },
            "failures": self.failures,
        }

    def _try(self, trial: Trial, row: Row) -> None:
        directory = self._newest.path
        trial.act(directory)
        before = _contents(directory)
        said: list[str] = []
        began = time.perf_counter()
        try:
            found = RunDir.open(self._run).newest(said.append)
        except FastBrainError as error:
            self._require_stop(trial, row, str(error), before)
            return
        row.ms.append(1e3 * (time.perf_counter() - began))
        if trial.fate == NEWER:
            raise Lost("the command did not stop")
        expected = self._newest if trial.fate == INTACT else self._older
        if found != expected:
            raise Lost(f"the newest intact checkpoint was said to be {found}; {said}")
        if trial.fate == INTACT:
            if said:
                raise Lost(f"it was refused: {said[0]}")
            return
        if not said or trial.names not in said[0].replace(str(directory), ""):
            raise Lost(f"the reason does not name it: {said}")
        where = directory if trial.fate == FOREIGN else self._aside
        if not where.is_dir() or _contents(where) != before:
            raise Lost(f"its bytes are not kept in {where.name}")
        if trial.fate == CORRUPT and directory.exists():
            raise Lost("it still has the name of an intact one")

    def _require_stop(
        self, trial: Trial, row: Row, reason: str, before: dict[str, bytes | None]
    ) -> None:
        """A newer format is no damage; a flipped bit in that one number cannot be told from it."""
        flipped = trial.fate == CORRUPT and trial.names == MANIFEST and "newer than" in reason
        if trial.fate != NEWER and not flipped:
            raise Lost(f"the command stopped: {reason}")
        if (not flipped and trial.names not in reason) or _contents(self._newest.path) != before:
            raise Lost(f"the command stopped, and not as it had to: {reason}")
        row.stopped += flipped

    def _go_on(self, trial: Trial) -> None:
        """Resume the run, damaged anew: it must come to the end that it had."""
        self._restore()
        trial.act(self._newest.path)
        self._resume(self._run) if self._resume is not None else None
        found = runs.end(self._run)
        for name in ("weights", "moments", "history", "samples"):
            if getattr(found, name) != getattr(self._expected, name):
                raise Lost(f"after going on, its {name} are not those of an undisturbed run")
        shutil.rmtree(self._run)
        shutil.copytree(self._whole, self._run)

    def _restore(self) -> None:
        for path in (self._newest.path, self._aside):
            if path.exists():
                shutil.rmtree(path)
        shutil.copytree(self._sources.newest, self._newest.path)


def _contents(directory: Path) -> dict[str, bytes | None]:
    """Every file's bytes by name; None for what is no file."""
    return {
        path.name: path.read_bytes() if path.is_file() else None for path in directory.iterdir()
    }
