"""The language-model losses of the reference: a sum and a count, never a mean.

`linear_cross_entropy` computes the gradients while it has a chunk's logits at hand, so that the
logits of all rows never exist at once: in a step over 8,192 rows of a 32,000-word vocabulary that
is 1 GB of FP32 not held.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbrain.kernels.derivatives import differentiated_once
from fastbrain.kernels.matmul import product, weight_grad


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    safe, row_weight = _screen(targets, mask, logits)
    # rows that do not count are taken out before the arithmetic: 0 times infinity is not 0
    kept = torch.where(mask[:, None], _wide(logits), 0)
    losses = F.cross_entropy(kept, safe, reduction="none") * row_weight
    return losses.sum(), mask.sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    chunk: int = 2048,
    max_rows: int | None = None,
    shadow: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden, weight, targets, mask, chunk, max_rows, shadow, torch.is_grad_enabled()
    )
    return loss, mask.sum()


def _screen(targets: Tensor, mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Targets that may be read, and each row's factor: 1 counts, 0 does not, NaN is an error."""
    vocab = like.shape[1]
    in_range = (targets >= 0) & (targets < vocab)
    factor = mask.to(torch.promote_types(like.dtype, torch.float32))
    factor = factor.masked_fill(mask & ~in_range, float("nan"))
    return torch.where(mask & in_range, targets, 0), factor


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        mask: Tensor,
        chunk: int,
        max_rows: int | None,
        shadow: Tensor | None,
        grad_enabled: bool,
    ) -> Tensor:
        operand = weight if shadow is None else shadow
        safe, row_weight = _screen(targets, mask, operand.T)
        kept = None
        if max_rows is not None:
            kept = mask.nonzero().squeeze(1)
            if len(kept) > max_rows:
                row_weight = row_weight + float("nan")
            rows, safe, row_weight = hidden[kept], safe[kept], row_weight[kept]
        else:
            # a row that does not count may hold anything, infinities included
            rows = torch.where(mask[:, None], hidden, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        drows = torch.empty_like(rows) if grad_enabled and hidden.requires_grad else None
        dweight = None
        if grad_enabled and weight.requires_grad:
            dweight = torch.zeros_like(operand, dtype=wide)
            # a row's factor goes to its hidden row here and to its gradient below: the logits,
            # where it belongs, are many times as wide
            factored = rows * row_weight[:, None].to(rows.dtype)
        for first in range(0, len(rows), chunk):
            part = slice(first, min(first + chunk, len(rows)))
            # BF16 operands round the logits, as the kernel does; log_softmax works in place
            logits = product(rows[part], operand.T).to(wide)
            torch.log_softmax(logits, dim=1, out=logits)
            at_target = safe[part, None]
            loss -= (logits.gather(1, at_target).squeeze(1) * row_weight[part]).sum()
            if drows is None and dweight is None:
                continue
            minus_one = torch.full_like(at_target, -1, dtype=wide)
            dlogits = logits.exp_().scatter_add_(1, at_target, minus_one).to(hidden.dtype)
            if drows is not None:
                product(dlogits, operand, out=drows[part])
                drows[part] *= row_weight[part, None]
            if dweight is not None:
                weight_grad(dlogits, factored[part], dweight)
        dhidden = drows
        if drows is not None and kept is not None:
            dhidden = torch.zeros_like(hidden).index_copy_(0, kept, drows)
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        ctx.grads = (dhidden, dweight)
        return loss

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "linear_cross_entropy scales its gradients in place, so backward runs only once; "
                "call the loss again"
            )
        grads, ctx.grads = ctx.grads, None
        dhidden, dweight = (g if g is None else g.mul_(dloss) for g in grads)
        return dhidden, dweight, None, None, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
