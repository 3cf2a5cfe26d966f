"""Who races in a training benchmark: fastbrain and its peers, behind one set of calls.

A contender is a model with one way of running it. The ways of a peer (precision, implementation of
its experts) share one model, so that trying them all costs no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bench.shapes import LEARNING_RATE, MAX_NORM, TrainingShape
from fastbrain import Optimizer, TokenBatch, TransformerLm

OPTIMIZER_RANGE = "bench::optimizer"


class Trainee(Protocol):
    """What a training step asks of a model; ids are (B, S) int64, losses and norms are 0-d."""

    name: str

    def parameters(self) -> int: ...
    def use(self, precision: str, option: str | None) -> None: ...
    def zero_grad(self) -> None: ...
    def accumulate(self, ids: Tensor) -> Tensor: ...
    def update(self) -> Tensor: ...


class Ours:
    """A fastbrain model of a shape."""

    name = "fastbrain"

    def __init__(self, shape: TrainingShape, device: torch.device, seed: int = 0) -> None:
        builder = TransformerLm.builder().config(shape.config).seed(seed)
        builder = builder.mixed_precision(False).optimizer(Optimizer.adam(LEARNING_RATE))
        self._model = builder.build()
        if device.type == "cuda":
            self._model.to_cuda()
        self._precision = "fp32"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """None: it runs anywhere."""
        return None

    def parameters(self) -> int:
        """Parameters in all; a tied head counts once."""
        return self._model.parameter_counts().total

    def use(self, precision: str, option: str | None) -> None:
        """Switch the precision; there is no other choice."""
        if precision != self._precision:
            self._model.set_mixed_precision(precision == "bf16")
            self._precision = precision

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def accumulate(self, ids: Tensor) -> Tensor:
        """Forward and backward over ids (B, S) int64; returns the 0-d loss."""
        # a batch of its own for every step, because a batch remembers its targets
        return self._model.accumulate_step(TokenBatch(list(ids))).total()

    def update(self) -> Tensor:
        """Clip to `MAX_NORM` and take an Adam step; returns the 0-d norm before clipping."""
        return self._model.step_clipped(1.0, MAX_NORM)


@dataclass(frozen=True)
class Contender:
    """One way of running one model.

    Attributes:
        trainee: the model, which other contenders may share.
        precision: "fp32" or "bf16".
        option: a peer's own choice, such as its experts implementation; None where it has none.
    """

    trainee: Trainee = field(repr=False)
    precision: str
    option: str | None = None

    @property
    def label(self) -> str:
        return label(self.trainee.name, self.precision, self.option)

    @property
    def ours(self) -> bool:
        return isinstance(self.trainee, Ours)

    def use(self) -> None:
        """Make the model run this way; call it before a turn, outside what is timed."""
        self.trainee.use(self.precision, self.option)

    def step(self, ids: Tensor) -> Tensor:
        """A whole training step over ids (B, S), its phases named for the profiler; the loss."""
        with torch.profiler.record_function(OPTIMIZER_RANGE):
            self.trainee.zero_grad()
        loss = self.trainee.accumulate(ids)
        with torch.profiler.record_function(OPTIMIZER_RANGE):
            self.trainee.update()
        return loss


class Absent(NamedTuple):
    """A contender that cannot race here, and why."""

    label: str
    reason: str


def label(name: str, precision: str, option: str | None = None) -> str:
    """What a table calls a contender."""
    return " ".join([name, precision, *filter(None, [option])])


def random_ids(shape: TrainingShape, seed: int = 0) -> Iterator[Tensor]:
    """Endless batches (B, S) int64, uniform over the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        size = (shape.batch, shape.seq_len)
        yield torch.randint(shape.config.vocab_size, size, generator=generator)
