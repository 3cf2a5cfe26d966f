"""Two steps to warm up and the timed ones, as the training program takes them."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fastbrain.lm import TransformerLm
from fastbrain.optim import Optimizer
from fastbrain.sweep_arch.memory import probe
from fastbrain.sweep_arch.place import Place
from fastbrain.sweep_arch.request import Request
from fastbrain.sweep_arch.watch import Watch
from fastbrain.tokens import TokenBatch

WARM_UP_STEPS = 2

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Measurement:
    """What was measured.

    Attributes:
        seconds: of each timed step.
        losses: of each timed step, nats a token.
        memory: bytes by name; `peak_bytes` is the one to quote.
        mixed_precision: whether products took BF16 operands.
    """

    seconds: list[float]
    losses: list[float]
    memory: dict[str, int | None]
    mixed_precision: bool

    def warnings(self) -> list[str]:
        """What speaks against the figures."""
        if all(map(math.isfinite, self.losses)):
            return []
        return ["the loss is not finite, so updates were skipped: these are no training steps"]


def measure(request: Request, place: Place, watch: Watch | None) -> Measurement:
    """Train on one batch that spans the vocabulary, and see how long it takes and what it needs.

    Raises:
        Cuda, CudaMemoryBudget, MemoryError, RuntimeError: out of memory.
        UnsupportedCuda: the card is too old.
    """
    memory = probe(place)
    model = TransformerLm(
        request.config, Optimizer.adam(1e-4), seed=7, mixed_precision=request.mixed_precision
    )
    if place.is_cuda:
        model.to_cuda(place.torch_device.index, request.budget_mib)
    batch = TokenBatch(spread_ids(request.config.vocab_size, request.batch, request.seq))
    for _ in range(WARM_UP_STEPS):
        _step(model, batch)
    place.synchronize()
    memory.poll()
    seconds, losses = [], []
    with nullcontext() if watch is None else watch.sampling():
        for _ in range(request.steps):
            start = time.perf_counter()
            loss = _step(model, batch)
            place.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
            memory.poll()
    return Measurement(
        seconds, [float(loss) for loss in losses], memory.peaks(), model.module.mixed_precision
    )


def spread_ids(vocab: int, batch: int, seq: int) -> npt.NDArray[np.int64]:
    """Ids over the whole vocabulary, (batch, seq), the same in every run.

    A narrow range of ids would send every token to the same few experts. They are the reference
    system's: xorshift64 modulo the vocabulary, sequence by sequence.
    """
    state, ids = 0x2545F4914F6CDD1D, np.empty(batch * seq, np.int64)
    for i in range(len(ids)):
        state ^= state << 13 & _MASK
        state ^= state >> 7
        state ^= state << 17 & _MASK
        ids[i] = state % vocab
    return ids.reshape(batch, seq)


def _step(model: TransformerLm, batch: TokenBatch) -> Tensor:
    model.zero_grad()
    losses = model.accumulate_step(batch)
    model.step_clipped(1.0, 1.0)
    return losses.lm_loss
