"""Contenders taking turns over the same batches, and what their rounds say.

On a CPU all of them are in memory and every other round goes in reverse, so that a machine that
slows down slows them all. On a card, which has the machine's attention but not always room for two
models, each runs its rounds, then makes way.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from bench.contenders import Absent, Contender


@dataclass(frozen=True)
class Timing:
    """One contender's rounds: tokens per wall-clock second, and CPU seconds per wall second.

    Attributes:
        peak_bytes: of the card's memory that tensors took; 0 on a CPU, whose is not counted.
    """

    label: str
    ours: bool
    precision: str
    trainee: str
    parameters: int
    tokens_per_s: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def disturbed(self) -> bool:
        """Whether something else had a tenth of the processor in any round."""
        return min(self.cores) < 0.9 * torch.get_num_threads()

    @property
    def median_per_cpu_s(self) -> float:
        """Tokens per CPU second, which waiting for a busy core costs nothing of."""
        rates = zip(self.tokens_per_s, self.cores, strict=True)
        return statistics.median(rate / cores for rate, cores in rates)


@dataclass
class Race:
    """What came of a race.

    Attributes:
        timings: of those that ran, in their order.
        absent: those that could not, and why.
        field: the contenders themselves, where they are still in memory, by label.
    """

    timings: list[Timing] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    field: dict[str, Contender] = field(default_factory=dict)


def in_turns(
    entries: Iterator[Contender | Absent], batches: Iterator[Tensor], rounds: int, steps: int
) -> Race:
    """The race on a CPU; a round is `steps` training steps of everyone."""
    race = Race()
    for entry in entries:
        if _enter(entry, batches, race):
            assert isinstance(entry, Contender)
            race.field[entry.label] = entry
            race.timings.append(_timing(entry))
    pairs = list(zip(race.field.values(), race.timings, strict=True))
    for turn in range(rounds):
        data = list(islice(batches, steps))
        for contender, timing in pairs if turn % 2 == 0 else reversed(pairs):
            _turn(contender, timing, data)
    return race


def one_by_one(
    entries: Iterator[Contender | Absent], batches: Iterator[Tensor], rounds: int, steps: int
) -> Race:
    """The race on a card."""
    race = Race()
    while (entry := next(entries, None)) is not None:
        torch.cuda.reset_peak_memory_stats()
        if _enter(entry, batches, race):
            assert isinstance(entry, Contender)
            timing = _timing(entry)
            for _ in range(rounds):
                _turn(entry, timing, list(islice(batches, steps)))
            peak = torch.cuda.max_memory_allocated()
            race.timings.append(replace(timing, peak_bytes=peak))
        # before the next one is built
        del entry
        gc.collect()
        torch.cuda.empty_cache()
    return race


def _enter(entry: Contender | Absent, batches: Iterator[Tensor], race: Race) -> bool:
    """Warms a contender up; whether it can run.

    Two steps: the first allocates moments, and fresh memory is slow for longer than one.
    """
    if isinstance(entry, Contender):
        try:
            entry.use()
            for ids in islice(batches, 2):
                entry.step(ids)
            return True
        except Exception as error:
            if entry.ours:
                raise
            entry = Absent(entry.label, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    race.absent.append(entry)
    print(f"left out: {entry.label} ({entry.reason})")
    return False


def _timing(contender: Contender) -> Timing:
    trainee = contender.trainee
    return Timing(
        contender.label,
        contender.ours,
        contender.precision,
        trainee.name,
        trainee.parameters(),
    )


def _turn(contender: Contender, timing: Timing, data: list[Tensor]) -> None:
    contender.use()
    _wait()
    wall, cpu = time.perf_counter(), time.process_time()
    for ids in data:
        contender.step(ids)
    _wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    timing.tokens_per_s.append(sum(ids.numel() for ids in data) / wall)
    timing.cores.append(cpu / wall)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
