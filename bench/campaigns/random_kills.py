"""Kills at random moments of a start, of the start that goes on with it, and so on."""

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.campaigns import runs
from bench.campaigns.phases import PHASES, Left, left, phase
from bench.campaigns.runs import STEPS, End, Lost, Orphans

# starts of one run that are killed before it is left alone
_MOST = 6

# between the saves of a run, one of them
_INTERVALS = (1, 1, 1, 3)


def campaign(folder: Path, kills: int, seed: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Kill this many starts; returns what came of it."""
    return _Campaign(folder, seed, say).run(kills)


class _Campaign:
    def __init__(self, folder: Path, seed: int, say: Callable[[str], object]) -> None:
        self._folder = folder
        self._draw = random.Random(seed)
        self._say = say
        whole = folder / "whole"
        runs.finish(whole)
        self._expected: End = runs.end(whole)
        # a start that finds nothing to do: what each of them takes before its first step
        self._idle_s = runs.finish(whole)
        self._steps_s = max(runs.finish(folder / "again") - self._idle_s, 1e-3)
        self._phases = dict.fromkeys(PHASES, 0)
        self._lost: dict[int, Counter[int]] = {interval: Counter() for interval in _INTERVALS}
        self._in_a_row: Counter[int] = Counter()
        self._missed = 0

    def run(self, kills: int) -> dict[str, Any]:
        killed = number = equal = 0
        failures: list[str] = []
        orphans: list[str] = []
        while killed < kills:
            run = self._folder / f"run-{number:04d}"
            number += 1
            done = 0
            try:
                done = self._kill(run, min(self._draw.randint(1, _MOST), kills - killed))
                self._leave_alone(run)
                equal += done
                shutil.rmtree(run)
            except Orphans as error:
                equal += done
                orphans.append(str(error))
            except Lost as error:
                # at least the kill that lost it
                done = max(done, 1)
                failures.append(str(error))
                self._say(str(error))
            killed += done
            self._in_a_row[done] += 1
            if number % 50 == 0:
                self._say(f"{killed} kills, {number} runs, {len(failures)} lost")
        return {
            "kills": killed,
            "bit_equal": equal,
            "runs": number,
            "by_phase": self._phases,
            "lost_steps": {
                str(interval): {str(steps): count for steps, count in sorted(lost.items())}
                for interval, lost in self._lost.items()
            },
            "kills_of_a_run": {str(n): count for n, count in sorted(self._in_a_row.items())},
            "ended_before_the_kill": self._missed,
            "orphans": orphans,
            "failures": failures,
        }

    def _kill(self, run: Path, starts: int) -> int:
        """Begin a run and kill it, again and again; how many starts were really killed."""
        interval, keep = self._draw.choice(_INTERVALS), self._draw.randint(1, 3)
        self._overrides = (f"save.interval_steps={interval}", f"save.keep={keep}")
        log = run.with_suffix(".log")
        killed = 0
        for more in range(starts, 0, -1):
            before = left(run)
            if before.saved == STEPS and self._draw.random() < 0.8:
                break  # nothing is left to lose
            pid = runs.start(runs.command(run, *self._overrides), log)
            code = runs.wait(pid, self._moment(before, more))
            code = runs.kill(pid) if code is None else code
            if code == 0:
                self._missed += 1
                continue
            if code != -9:
                raise Lost(f"{run.name} ended with exit code {code}{runs.tail(log)}")
            killed += 1
            now = left(run)
            self._phases[phase(before, now, STEPS)] += 1
            lost = max(now.trained - now.saved, 0)
            self._lost[interval][lost] += 1
            # the steps since the last save, and those trained while that one was written
            if lost > 2 * interval:
                raise Lost(f"{run.name} lost {lost} steps, with {interval} from save to save")
        return killed

    def _leave_alone(self, run: Path) -> None:
        rest = 1 - left(run).saved / STEPS
        took_s = runs.finish(run, *self._overrides)
        if rest > 0.5:
            # others may use the machine, now more and now less
            self._steps_s += 0.2 * (max(took_s - self._idle_s, 1e-3) / rest - self._steps_s)
        runs.require_same(run, self._expected)

    def _moment(self, before: Left, more: int) -> float:
        """Seconds after which to kill: while it trains and saves; every sixth time anywhere.

        With `more` kills to come, so early that the run has something left for them.
        """
        rest_s = self._steps_s * (1 - before.saved / STEPS)
        if self._draw.random() < 1 / 6:
            return math.exp(self._draw.uniform(math.log(1e-3), math.log(self._idle_s + rest_s)))
        return self._draw.uniform(self._idle_s / 2, self._idle_s + 2 * rest_s / (1 + more))
