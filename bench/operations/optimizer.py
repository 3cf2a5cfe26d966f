"""The update of all parameters and the norm of all gradients, against PyTorch's fused ones."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.operations.case import Case, Sizes
from fastbrain.kernels import AdamScalars, fused, reference

_TENSORS = 20
_RATE = 1e-2


def adam(z: Sizes, device: torch.device) -> Iterator[Case]:
    sizes = [z.parameters // _TENSORS] * _TENSORS
    p, g, m, v = ([torch.randn(n, device=device) for n in sizes] for _ in range(4))
    for x in v:
        x.square_()
    shadows = [x.bfloat16() for x in p]
    scalars = AdamScalars(
        *(torch.full((), x, device=device) for x in (_RATE, 1.0, 1.0)),
        torch.zeros((), dtype=torch.int64, device=device),
        torch.zeros((), dtype=torch.int32, device=device),
    )

    written = (*p, *m, *v, *shadows)

    def step(twin: Any) -> tuple[Tensor, ...]:
        twin.adam_step(
            *(p, g, m, v, shadows, scalars),
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decays=[0.1] * len(p),
        )
        return written

    # on the same memory: a card of 12 GB has no room for both
    theirs = [x.detach().requires_grad_() for x in p]
    optimizer = torch.optim.AdamW(theirs, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for x, grad, first, second in zip(theirs, g, m, v, strict=True):
        x.grad = grad
        count = torch.zeros((), device=device)
        optimizer.state[x] = {"step": count, "exp_avg": first, "exp_avg_sq": second}

    def fused_adamw() -> tuple[Tensor, ...]:
        optimizer.step()
        torch._foreach_copy_(shadows, [x.detach() for x in theirs])
        return written

    contenders = {
        "fused": lambda: step(fused),
        "reference": lambda: step(reference),
        "AdamW fused + cast": fused_adamw,
    }
    yield Case("adam_step", contenders, 30.0 * sum(sizes))


def grad_norm(z: Sizes, device: torch.device) -> Iterator[Case]:
    grads = [torch.randn(z.parameters // _TENSORS, device=device) for _ in range(_TENSORS)]
    contenders = {
        "fused": lambda: fused.grad_norm(grads),
        "reference": lambda: reference.grad_norm(grads),
        "get_total_norm": lambda: torch.nn.utils.get_total_norm(grads),
    }
    yield Case("grad_norm", contenders, 4.0 * sum(x.numel() for x in grads))
