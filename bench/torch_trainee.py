"""A PyTorch module trained as its documentation says: autocast, clipping, PyTorch's fused AdamW."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bench.shapes import LEARNING_RATE, MAX_NORM


class TorchTrainee:
    """A peer of fastbrain in a race; a subclass says what its model loses.

    Args:
        model: computes what `loss` makes of it; moved to the device.
        device: where it trains.

    Attributes:
        precision: "fp32", or "bf16" for the forward under autocast.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.precision = "fp32"
        self.device = device
        self.model: Any = model.to(device).train()
        # betas and eps are PyTorch's defaults, which are also fastbrain's
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )

    def loss(self, ids: Tensor) -> Tensor:
        """0-d loss over ids (B, S) int64 on the model's device."""
        raise TypeError(f"{type(self).__name__} does not say what it loses")

    def parameters(self) -> int:
        """Parameters in all; a tied head counts once."""
        return sum(p.numel() for p in self.model.parameters())

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def accumulate(self, ids: Tensor) -> Tensor:
        """Forward and backward over ids (B, S) int64; returns the 0-d loss."""
        ids = ids.to(self.device, non_blocking=True)
        bf16 = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            loss = self.loss(ids)
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self) -> Tensor:
        """Clip to `MAX_NORM` and take an AdamW step; returns the 0-d norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        return norm
