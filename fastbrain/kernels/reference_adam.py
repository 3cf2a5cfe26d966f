"""Adam and the gradient norm of the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fastbrain.kernels.contracts import AdamScalars

_BLOCK = 1024  # elements


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    shadows: Sequence[Tensor],
    scalars: AdamScalars,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decays: Sequence[float],
) -> None:
    if scalars.skip:
        return
    factor = float(scalars.grad_scale) * float(scalars.clip)
    with torch.no_grad():
        scratch: Tensor | None = None
        for p, g, m, v, shadow, decay in zip(
            params, grads, exp_avgs, exp_avg_sqs, shadows, weight_decays, strict=True
        ):
            grad = g.to(p.dtype) if g.numel() else torch.zeros_like(p)
            if factor != 1.0:
                if scratch is None:
                    # one buffer for all: fresh memory would cost more than the product
                    scratch = p.new_empty(max(other.numel() for other in params))
                grad = torch.mul(grad, factor, out=scratch[: p.numel()].view_as(p))
            # PyTorch's own AdamW: one pass over memory, which the plain formula would make ten of
            adamw(
                [p],
                [grad],
                [m],
                [v],
                [],
                [scalars.step.float()],
                fused=True,
                amsgrad=False,
                beta1=betas[0],
                beta2=betas[1],
                lr=float(scalars.lr),
                weight_decay=decay,
                eps=eps,
                maximize=False,
            )
            if shadow.numel():
                shadow.copy_(p)
        # PyTorch's fused update leaves no trace in their versions, which shadows and autograd go by
        torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs])
        scalars.step.add_(1)


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    with torch.no_grad():
        squares = [_square_sum(grad) for grad in grads]
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return torch.stack(squares).sum().sqrt().to(wide)


def _square_sum(grad: Tensor) -> Tensor:
    """The sum of squares, in FP64 over FP32 blocks: in FP32, 16M of them are off by 1e-4."""
    flat = grad.flatten()
    wide = torch.promote_types(grad.dtype, torch.float32)
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=-1, dtype=wide)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=wide)
    return blocks.double().square().sum() + rest.double().square()
