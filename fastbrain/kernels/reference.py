"""What each hot operation means, in plain PyTorch: right by inspection, and what the CPU runs.

Statistics and sums are at least FP32; FP64 inputs stay FP64, because this file in FP64 is the truth
that every kernel is held to. Contracts are in `fastbrain.kernels`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbrain.kernels.contracts import AdamScalars
from fastbrain.kernels.derivatives import differentiated_once
from fastbrain.kernels.matmul import grouped_linear, linear
from fastbrain.kernels.reference_adam import adam_step, grad_norm
from fastbrain.kernels.reference_loss import linear_cross_entropy, masked_cross_entropy

__all__ = [
    "AdamScalars",
    "adam_step",
    "causal_attention",
    "expert_ffn",
    "grad_norm",
    "grouped_matmul",
    "linear",
    "linear_cross_entropy",
    "masked_cross_entropy",
    "rms_norm",
    "rotary",
    "swiglu",
]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, segments: Tensor | None = None
) -> Tensor:
    visible = None
    # PyTorch's own causal mask comes before the scale: 0 or less makes NaN of its infinities
    if segments is not None or (scale is not None and scale <= 0):
        S = q.shape[1]
        visible = torch.ones(S, S, dtype=torch.bool, device=q.device).tril()
        if segments is not None:
            visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).contiguous()


def expert_ffn(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    shadows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    E = w_gate_up.shape[0]
    in_range = (expert_ids >= 0) & (expert_ids < E)
    # a skipped slot's row is 0, and 0 times infinity would not be
    gates = torch.where(in_range, gates, 0)
    # a stable sort: slots of one expert keep the order of their tokens; skipped slots come last
    experts = torch.where(in_range, expert_ids, E).flatten()
    order = experts.argsort(stable=True)
    counts = (experts[:, None] == torch.arange(E, device=x.device)).sum(dim=0).tolist()
    slot = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    gate_up_shadow, down_shadow = shadows or (None, None)
    rows: Tensor = _Spread.apply(x, order, slot.view_as(expert_ids))
    hidden = grouped_linear(rows, w_gate_up, gate_up_shadow, counts)
    y = grouped_linear(swiglu(hidden), w_down, down_shadow, counts)
    out: Tensor = _Combine.apply(y, gates, order, slot.view_as(expert_ids))
    return out


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, shadow: Tensor | None = None) -> Tensor:
    return grouped_linear(x, w, shadow, offsets.diff().tolist())


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    y: Tensor = _RmsNorm.apply(h, weight, eps, dtype or x.dtype)
    return y, x if residual is None else h.to(residual.dtype)


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int = 0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows = slice(offset, offset + q.shape[1]) if positions is None else positions
    cos, sin = cos[rows].unsqueeze(-2), sin[rows].unsqueeze(-2)
    turned: tuple[Tensor, Tensor] = _Turn.apply(q, cos, sin), _Turn.apply(k, cos, sin)
    return turned


def swiglu(gate_up: Tensor) -> Tensor:
    out: Tensor = _SwiGlu.apply(gate_up)
    return out


class _Spread(torch.autograd.Function):
    """Copies every token's row to its slots, in expert order; backward sums a token's slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.index_select(0, order // slot.shape[1])

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return F.embedding_bag(slot, _wide(drows), mode="sum").to(drows.dtype), None, None


class _Combine(torch.autograd.Function):
    """The gate-weighted sum of a token's expert outputs, in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gates: Tensor, order: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(y, gates, order, slot)
        # a bag of expert rows per token: gathered, weighted and summed in one pass
        out = F.embedding_bag(slot, y.to(gates.dtype), mode="sum", per_sample_weights=gates)
        return out.to(y.dtype)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, gates, order, slot = ctx.saved_tensors
        drows = dout.index_select(0, order // slot.shape[1]).to(gates.dtype)
        dgates = (drows * y).sum(dim=-1)
        dy = drows.mul_(gates.flatten()[order, None]).to(y.dtype)
        return dy, dgates[slot], None, None


class _RmsNorm(torch.autograd.Function):
    """y = h / sqrt(mean(h^2) + eps) * weight; Zhang and Sennrich, 2019 (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_() / h.shape[1]
        rstd = (mean_square + eps).rsqrt_()
        ctx.save_for_backward(h, weight, rstd)
        return (h * rstd).mul_(weight).to(dtype)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        h, weight, rstd = ctx.saved_tensors
        dy = dy.to(h.dtype)
        product = dy * h
        dweight = (rstd.T @ product).view_as(weight)
        # d rstd / dh = -rstd^3 h / D
        pull = (product @ weight)[:, None].mul_(rstd.pow(3)).div_(h.shape[1])
        dh = torch.mul(dy, weight, out=product).mul_(rstd).addcmul_(h, pull, value=-1)
        return dh, dweight, None, None


class _Turn(torch.autograd.Function):
    """Rotary embedding of half-split pairs; backward turns by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dout, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    low, high = wide.chunk(2, dim=-1)
    out = torch.empty(wide.shape, dtype=wide.dtype, device=x.device)
    out_low, out_high = out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin)
    return out.to(x.dtype)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up, saving its input alone; Shazeer, 2020 (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).to(gate_up.dtype)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        wide, dout = _wide(gate_up), _wide(dout)
        gate, up = wide.chunk(2, dim=-1)
        dgate_up = torch.empty_like(wide)
        dgate, dup = dgate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), dout, out=dup)
        torch.ops.aten.silu_backward.grad_input(dout * up, gate, grad_input=dgate)
        return dgate_up.to(gate_up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
