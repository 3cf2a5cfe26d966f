"""A whole training step that a CUDA graph can hold: new data and rates, the same memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.graphed import aside, captured
from fastbrain import TokenBatch, TransformerLm, kernels
from fastbrain.kernels import AdamScalars
from fastbrain.layers import Weight
from fastbrain.optim import Adam


class GraphedStep:
    """Forward, backward, clipping and Adam of a model, with moments of its own.

    Forward and backward are one graph, clipping and Adam another: the update needs a table of the
    gradients' addresses, which has to be made before it is captured and after they have them.

    Args:
        lm: its weights are trained in place; its optimizer gives betas and eps.
        like: a batch of the shape of all that follow, without padding.
        capture: whether to capture graphs, which takes a CUDA device; else every call is eager.
        max_norm: of the gradients.

    Attributes:
        loss: total loss of the last step, 0-d FP32.
        norm: its gradients' norm before clipping, 0-d FP32.
    """

    def __init__(
        self, lm: TransformerLm, like: TokenBatch, capture: bool, max_norm: float = 1.0
    ) -> None:
        assert isinstance(lm.optimizer, Adam)
        assert lm.optimizer.weight_decay == 0.0
        self._module, self._optimizer, self._max_norm = lm.module, lm.optimizer, max_norm
        self._params = list(lm.module.parameters())
        self._first, self._second = (
            [torch.zeros_like(p.detach()) for p in self._params] for _ in range(2)
        )
        device = self._params[0].device
        self._rows = like.predicted()
        self._data = [x.to(device, copy=True) for x in (like.ids, *like.targets())]
        self._rate, self._one = (torch.ones((), device=device) for _ in range(2))
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        # an update that is held changes nothing: that is how a warm-up leaves no trace
        self._hold = torch.ones((), dtype=torch.int32, device=device)
        self._replays: list[Callable[[], None]] = []
        self._step()
        if capture:
            self._capture()
        self._hold.zero_()

    def __call__(self, batch: TokenBatch, rate: float) -> None:
        """Takes a step on a batch at a learning rate."""
        for kept, new in zip(self._data, (batch.ids, *batch.targets()), strict=True):
            kept.copy_(new, non_blocking=True)
        self._rate.fill_(rate)
        for run in self._replays or [self._step]:
            run()

    def _step(self) -> None:
        self._learn()
        self._update()

    def _learn(self) -> None:
        ids, targets, mask = self._data
        for p in self._params:
            p.grad = None
        loss_sum, count, auxiliary = self._module(
            ids, targets=targets, mask=mask, max_rows=self._rows
        )
        loss = loss_sum / count.clamp(min=1) + auxiliary
        loss.backward()
        self.loss = loss.detach()

    def _update(self) -> None:
        grads = [self._gradient(p) for p in self._params]
        self.norm = norm = kernels.grad_norm(grads)
        finite = norm.isfinite()
        # tensors on the card throughout: a graph cannot hold a copy of a number of the host
        clip = torch.where(norm > self._max_norm, self._max_norm / norm, self._one)
        weights = [m for m in self._module.modules() if isinstance(m, Weight)]
        shadows = {id(w.weight): w.shadow for w in weights if w.shadow is not None}
        none = torch.empty(0, dtype=torch.bfloat16, device=norm.device)
        kernels.adam_step(
            [p.detach() for p in self._params],
            grads,
            self._first,
            self._second,
            [shadows.get(id(p), none) for p in self._params],
            AdamScalars(
                lr=self._rate,
                grad_scale=self._one,
                clip=torch.where(finite, clip, self._one),
                step=self._count,
                skip=(~finite).to(torch.int32) | self._hold,
            ),
            betas=self._optimizer.betas,
            eps=self._optimizer.eps,
            weight_decays=[0.0] * len(grads),
        )
        for weight in weights:
            if weight.shadow is not None:
                weight.keep_shadow_in_step()

    def _gradient(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        assert p.grad.is_contiguous()
        return p.grad

    def _capture(self) -> None:
        aside(self._step)
        learn = captured(self._learn)
        # held, and on gradients that nobody has computed yet: it only makes the tables
        self._update()
        torch.cuda.synchronize()
        self._replays = [learn, captured(self._update)]
