"""A training step of fastbrain as CUDA graphs: the host only says when.

There are two graphs, forward with backward and the update. A launch of the update has the addresses
of all gradients in a table on the device, built by the host before any capture; but where the
gradients of a captured backward are is known only once it has been captured. Gradients at addresses
of their own would do with one graph, and cost two more passes over each: to clear, and to add.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.contenders import Ours
from bench.shapes import MAX_NORM, TrainingShape
from fastbrain import TokenBatch

_WARM_UP = 3


class Graphed(Ours):
    """A fastbrain model of a shape whose steps are replayed.

    Batches are whole: without padding or masks, so that the number of predictions is the graph's.
    The first batch is trained on `_WARM_UP` times and once more before anything is replayed.
    """

    name = "fastbrain graphs"

    def __init__(self, shape: TrainingShape, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        self._ids, self._targets = (
            torch.zeros(shape.batch, shape.seq_len, dtype=torch.int64, device=device)
            for _ in range(2)
        )
        self._mask = torch.zeros_like(self._ids, dtype=torch.bool)
        self._predicted = shape.batch * (shape.seq_len - 1)
        self._grads: list[Tensor | None] = []
        self._replays: tuple[Callable[[], None], Callable[[], None]] | None = None

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        return None if device.type == "cuda" else "CUDA graphs need a CUDA device"

    def use(self, precision: str, option: str | None) -> None:
        """Switch the precision, which makes captured steps worthless."""
        if precision != self._precision:
            self._replays = None
        super().use(precision, option)

    def zero_grad(self) -> None:
        """Nothing: a replayed backward writes its gradients afresh."""

    def accumulate(self, ids: Tensor) -> Tensor:
        """Forward and backward over ids (B, S) int64; returns the 0-d loss."""
        # the host makes targets for every batch, as in an eager step
        batch = TokenBatch(list(ids))
        targets, mask = batch.targets()
        for static, fresh in (
            (self._ids, batch.ids),
            (self._targets, targets),
            (self._mask, mask),
        ):
            static.copy_(fresh, non_blocking=True)
        if self._replays is None:
            self._replays = self._captured()
        self._replays[0]()
        return self._loss.clone()

    def update(self) -> Tensor:
        """Clip to `MAX_NORM` and take an Adam step; returns the 0-d norm before clipping."""
        assert self._replays is not None, "there are no gradients to update with"
        self._replays[1]()
        return self._norm.clone()

    def _captured(self) -> tuple[Callable[[], None], Callable[[], None]]:
        def eager() -> None:
            for _ in range(_WARM_UP):
                self._forward_and_backward()
                self._update()

        # kernels are compiled, moments and shadows made where no graph can see
        aside(eager)
        gradients = captured(self._forward_and_backward)
        gradients()
        # the update drops them, and a graph may not outlive the memory it names
        parameters = list(self._model.module.parameters())
        self._grads = [p.grad for p in parameters]
        # it builds the tables of these addresses
        self._update()
        for p, grad in zip(parameters, self._grads, strict=True):
            p.grad = grad
        return gradients, captured(self._update)

    def _forward_and_backward(self) -> None:
        self._model.zero_grad()
        loss_sum, count, auxiliary = self._model.module(
            self._ids, targets=self._targets, mask=self._mask, max_rows=self._predicted
        )
        loss = loss_sum / count.clamp(min=1) + auxiliary
        loss.backward()
        self._loss = loss.detach()

    def _update(self) -> None:
        self._norm = self._model.step_clipped(1.0, MAX_NORM)


def aside(run: Callable[[], None]) -> None:
    """Runs on a stream of its own, as capturing wants of what comes before it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """What `run` starts on the device, as a graph; it runs when the result is called."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
