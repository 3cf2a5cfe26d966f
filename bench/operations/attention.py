"""Causal attention with grouped query heads, against PyTorch's two."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.compiling import compiled
from bench.operations.case import Case, Sizes, Ways, leaf
from fastbrain.kernels import fused, reference


def attention(z: Sizes, device: torch.device) -> Iterator[Case]:
    q = leaf(z.B, z.S, z.H, z.K, device=device)
    k, v = (leaf(z.B, z.S, z.G, z.K, device=device) for _ in range(2))
    leaves = (q, k, v)

    def heads() -> list[Tensor]:
        return [x.transpose(1, 2) for x in leaves]

    def sdpa() -> Tensor:
        out = F.scaled_dot_product_attention(*heads(), is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    ways = Ways()
    ways.add("fused", lambda: fused.causal_attention(*leaves), leaves)
    ways.add("reference", lambda: reference.causal_attention(*leaves), leaves)
    ways.add("SDPA", sdpa, leaves)
    if device.type == "cuda":
        mask = create_block_mask(_causal, None, None, z.S, z.S, device=device)
        flex = compiled(flex_attention)

        def flex_attend() -> Tensor:
            out: Tensor = flex(*heads(), block_mask=mask, enable_gqa=True)
            return out.transpose(1, 2)

        ways.add("FlexAttention", flex_attend, leaves)
    else:
        ways.add("FlexAttention", sdpa, leaves, "its backward needs a CUDA device")
    unit = z.B * z.H * z.S**2 * z.K
    traffic = 4 * z.N * (z.H + z.G) * z.K
    yield ways.forward("attention forward", traffic, 2 * unit)
    yield ways.both("attention forward+backward", 3 * traffic, 7 * unit)


def _causal(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j
