"""What a run's directory tells, read once: the page is written from this alone.

Only reads, and takes no lock: a trainer may be at work, and a file may be gone between the listing
of its folder and the reading.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastbrain import atomic
from fastbrain.errors import FastBrainError, Io, Serde
from fastbrain.training import guard_log, lock, manifest, metrics
from fastbrain.training.report.axes import Numbers
from fastbrain.training.report.kept import Kept, kept
from fastbrain.training.report.words import number
from fastbrain.training.run_dir import RunDir
from fastbrain.training.settings import Settings

_COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "start")


class Start(NamedTuple):
    """One start of a run: what it ran, not all of which need be part of the history.

    `rolled_back` says that the guard began it, in the same process as the start before.
    """

    start: int
    first: int
    last: int
    seconds: float
    rolled_back: bool


@dataclass(frozen=True)
class Story:
    """A run.

    Attributes:
        settings: None where config.toml was edited into something that is refused.
        columns: of the merged history's steps: step, loss, grad_norm, learning_rate,
            tokens_per_s, start; NaN where a row has no number.
        last: the newest step's row; empty before the first.
        scores: (step, held-out loss) of every evaluation.
        starts: oldest first.
        guard: rows of guard.jsonl, oldest step first.
        kept: checkpoints, oldest step first.
        state: trainer_state.json of the newest checkpoint that has one.
        data: fingerprints of the token files by part.
        holder: what the process that trains the run now says of itself; None when there is none.
    """

    run: RunDir
    settings: Settings | None
    columns: dict[str, Numbers]
    last: dict[str, Any]
    scores: list[tuple[float, float]]
    starts: list[Start]
    guard: list[dict[str, Any]]
    kept: list[Kept]
    state: dict[str, Any]
    data: dict[str, Any]
    holder: dict[str, Any] | None

    @property
    def total(self) -> int | None:
        """Steps of the whole run."""
        return None if self.settings is None else self.settings.steps

    @property
    def step(self) -> int:
        """Steps finished, as far as metrics or a checkpoint tell."""
        steps = self.columns["step"]
        whole = [each.step for each in self.kept if each.aside is None]
        return int(max([0, *steps[-1:], *whole[-1:]]))

    @property
    def saved(self) -> int:
        """The step that a resume would go on from, 0 for none."""
        sound = [each.step for each in self.kept if each.aside is None and not each.fault]
        return max(sound, default=0)

    @property
    def standing(self) -> str:
        """`running`, `done`, `stopped` or `not begun`."""
        if self.holder is not None:
            return "running"
        if self.total is not None and self.saved >= self.total:
            return "done"
        return "stopped" if self.step else "not begun"

    @property
    def best(self) -> tuple[float, float] | None:
        """(step, loss) of the lowest held-out loss."""
        return min(self.scores, key=lambda score: (score[1], score[0]), default=None)

    @property
    def seconds(self) -> float:
        """Time trained, over all starts."""
        return sum(
            each.seconds
            for each, after in zip(self.starts, [*self.starts[1:], None], strict=True)
            # the clock of a start that was rolled back runs on in the next one
            if after is None or not after.rolled_back
        )


def read(run: RunDir, verify: bool) -> Story:
    """Read a run.

    Args:
        run: the run.
        verify: read every byte of its checkpoints.

    Raises:
        Io: a file is there and cannot be read.
    """
    guard = guard_log.read(run.guard_log)
    guard = [row for row in guard if math.isfinite(number(row["step"]))]
    with atomic.io_errors("read", run.metrics):
        starts = _starts(run.metrics, guard)
    rows = [row for row in metrics.read(run.metrics) if math.isfinite(number(row["step"]))]
    steps = [row for row in rows if "loss" in row]
    scores = [row for row in rows if math.isfinite(number(row.get("val_loss")))]
    found = kept(run, verify)
    state = _state(found)
    return Story(
        run,
        _settings(run),
        _columns(steps),
        steps[-1] if steps else {},
        [(float(row["step"]), float(row["val_loss"])) for row in scores],
        starts,
        guard,
        found,
        state,
        _data(run.path, state),
        lock.holder(run.path) or {} if lock.is_held(run.path) else None,
    )


def _columns(rows: list[dict[str, Any]]) -> dict[str, Numbers]:
    return {
        key: np.fromiter((number(row.get(key)) for row in rows), np.float64, len(rows))
        for key in _COLUMNS
    }


def _starts(path: Path, guard: Iterable[dict[str, Any]]) -> list[Start]:
    """Every start that wrote the row of a step, with its clock."""
    back = [row.get("start") for row in guard if row["kind"] == "rollback"]
    spans: dict[int, list[tuple[int, float]]] = {}
    for start, step, seconds in _ends(path):
        spans.setdefault(start, []).append((step, seconds))
    found: list[Start] = []
    for start, ends in sorted(spans.items()):
        (first, began), (last, _) = ends[0], ends[-1]
        goes_on = bool(found) and start - 1 in back and began >= found[-1].seconds
        found.append(Start(start, first, last, max(seconds for _, seconds in ends), goes_on))
    return found


def _ends(path: Path) -> Iterator[tuple[int, int, float]]:
    """Start, step and clock of the first and the last step that each start wrote.

    A line begins with its start, and only a step has a clock; so half a million lines need not be
    parsed a second time. `metrics.read` leaves out what a later start ran again.
    """
    for line in _end_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        start, step = row.get("start"), row.get("step")
        if type(start) is int and type(step) is int:
            seconds = number(row.get("time_s"))
            yield start, step, seconds if math.isfinite(seconds) else 0.0


def _end_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    before = b""
    with path.open("rb") as file:
        for line in file:
            if b'"time_s"' not in line or not line.endswith(b"}\n"):
                continue
            if line.partition(b",")[0] != before.partition(b",")[0]:
                yield from (before, line)
            before = line
    yield before


def _settings(run: RunDir) -> Settings | None:
    try:
        return Settings.from_tables(run.tables)
    except FastBrainError:
        return None


def _state(found: list[Kept]) -> dict[str, Any]:
    # the newest, and one that counts before one that was put aside or is damaged
    counting = sorted(found, key=lambda one: (not one.aside and not one.fault, one.step))
    for each in reversed(counting):
        try:
            return manifest.document(each.path / "trainer_state.json")
        except (Io, Serde):
            continue
    return {}


def _data(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fingerprints by part, from the checkpoint or, before the first, from the prepared tokens."""
    data = state.get("data")
    if not isinstance(data, dict):
        try:
            data = json.loads((path / "data" / "corpus.json").read_bytes())["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}
    if not isinstance(data, dict):
        return {}
    return {str(part): file for part, file in data.items() if isinstance(file, dict)}
