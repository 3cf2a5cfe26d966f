"""Parameters for FusedAdam, and steps of it."""

import torch

SHAPES = [(5, 3), (7,), (2, 2, 2), ()]


def parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [p.to(device, dtype).requires_grad_() for p in made]


def gradients(step, absent=()):
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [None if i in absent else g for i, g in enumerate(made)]


def run(optimizer, params, steps, first=0, absent=lambda step: ()):
    for step in range(first, first + steps):
        for p, g in zip(params, gradients(step, absent(step)), strict=True):
            p.grad = None if g is None else g.to(p.device, p.dtype)
        optimizer.step()


def bits(params, optimizer):
    tensors = [*params, *(x for p in params for x in optimizer.state[p].values())]
    return [x.detach().flatten().view(torch.uint8).tolist() for x in tensors]
