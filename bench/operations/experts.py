"""Experts over routed tokens, and the grouped product they are made of, against `_grouped_mm`."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.operations.case import Case, Sizes, Ways, leaf
from fastbrain.kernels import fused, reference


def expert_ffn(z: Sizes, device: torch.device) -> Iterator[Case]:
    x = leaf(z.N, z.D, device=device)
    gate_up = leaf(z.E, 2 * z.F, z.D, device=device, dtype=torch.float32)
    down = leaf(z.E, z.D, z.F, device=device, dtype=torch.float32)
    shadows = (gate_up.detach().bfloat16(), down.detach().bfloat16())
    narrow = tuple(w.clone().requires_grad_() for w in shadows)
    scores = torch.rand(z.N, z.E, device=device)
    ids = scores.topk(z.k, dim=1).indices
    gates = torch.rand(z.N, z.k, device=device).requires_grad_()

    def grouped_mm() -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        offsets = torch.bincount(flat, minlength=z.E).cumsum(0).int()
        rows = x[order // z.k]
        gate, up = torch._grouped_mm(rows, narrow[0].mT, offs=offsets).chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, narrow[1].mT, offs=offsets)
        weighted = y * gates.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, order // z.k, weighted)

    given = (x, gate_up, down, ids, gates, shadows)
    leaves = (x, gate_up, down, gates)
    ways = Ways()
    ways.add("fused", lambda: fused.expert_ffn(*given), leaves)
    ways.add("reference", lambda: reference.expert_ffn(*given), leaves)
    ways.add("grouped_mm", grouped_mm, (x, *narrow, gates))
    slots = z.N * z.k
    flops = 6 * slots * z.D * z.F
    traffic = 2 * (3 * slots * z.D + 4 * slots * z.F + 3 * z.E * z.F * z.D + z.N * z.D)
    yield ways.forward("experts forward", traffic, flops)
    yield ways.both("experts forward+backward", 3 * traffic, 3 * flops)


def grouped_matmul(z: Sizes, device: torch.device) -> Iterator[Case]:
    M, width = z.N * z.k, 2 * z.F
    x = leaf(M, z.D, device=device)
    w = leaf(z.E, width, z.D, device=device, dtype=torch.float32)
    shadow = w.detach().bfloat16()
    narrow = shadow.clone().requires_grad_()
    counts = torch.randint(z.E, (M,), device=device).bincount(minlength=z.E)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    ways = Ways()
    ways.add("fused", lambda: fused.grouped_matmul(x, w, offsets, shadow), (x, w))
    ways.add("reference", lambda: reference.grouped_matmul(x, w, offsets, shadow), (x, w))
    ways.add("grouped_mm", lambda: torch._grouped_mm(x, narrow.mT, offs=offsets[1:]), (x, narrow))
    flops = 2 * M * z.D * width
    traffic = 2 * (M * z.D + z.E * width * z.D + M * width)
    yield ways.forward("grouped_matmul forward", traffic, flops)
    yield ways.both("grouped_matmul forward+backward", 3 * traffic, 3 * flops)
