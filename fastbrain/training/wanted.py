"""Whether a run is to stop or to save now, as signals, files and clocks say; all ranks agree.

One process looks after every step. Several put what each wants into the sum of the next step, so
that all know it at the same moment: a stop that is asked for in one step is carried out after the
next.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Self

from fastbrain.parallel.ranks import Ranks
from fastbrain.training import rules
from fastbrain.training.devices import Device
from fastbrain.training.exchange import Wishes
from fastbrain.training.progress import Pace
from fastbrain.training.requests import Requests
from fastbrain.training.settings import Settings


class Wanted:
    """While entered, signals are heard.

    Args:
        settings: of the run.
        ranks: of the run. The first one alone looks at files and clocks, whose times would differ.
        run: the run's directory.
        device: of this rank.
        pace: of this start.
        say: takes a sentence for the user.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        run: Path,
        device: Device,
        pace: Pace,
        say: Callable[[str], object],
    ) -> None:
        limit = settings.train.max_time
        self._limit_s = math.inf if limit is None else rules.seconds(limit)
        self._save_every_s = settings.save_every_s
        self._ranks = ranks
        self._device = device
        self._pace = pace
        self._requests = Requests(run if ranks.leads else None, say)
        self._saved_s = 0.0
        # of any rank, in the steps whose numbers have arrived
        self._heard = Wishes()

    def __enter__(self) -> Self:
        self._requests.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.__exit__(*error)

    def to_tell(self) -> Wishes:
        """What this rank has to tell the others in this step."""
        if self._ranks.size == 1:
            return Wishes()
        return self._own()._replace(peak_bytes=self._device.peak_bytes())

    def hear(self, wishes: Wishes) -> None:
        """Take what the ranks told each other in a step whose numbers have arrived."""
        self._heard = self._heard.joined(wishes)

    def now(self) -> Wishes:
        """What is to be done after this step."""
        return self._own() if self._ranks.size == 1 else self._heard

    def note_save(self) -> None:
        """Say that a checkpoint was begun: who asked for one has it."""
        self._saved_s = self._pace.elapsed_s()
        self._heard = self._heard._replace(save=False)

    def _own(self) -> Wishes:
        stop, save, elapsed_s = self._requests.stop(), False, self._pace.elapsed_s()
        if self._ranks.leads:
            every_s = self._save_every_s
            due = every_s is not None and elapsed_s - self._saved_s >= every_s
            save = self._requests.save() or due
            stop = stop or elapsed_s >= self._limit_s
        return Wishes(stop, save)
