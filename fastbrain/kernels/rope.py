"""Rotary position embedding of queries and keys, in one launch.

    lo' = lo cos - hi sin;  hi' = hi cos + lo sin

lo and hi are the halves of a head, cos and sin a row of the tables, at the token's position. A
program owns a block of rows, heads of consecutive tokens, first those of q, then those of k; their
strides are free, so that both may be views of one projection. Backward is the same with -sin, and
nothing of q and k is saved. Shapes: q (B, S, H, K), k (B, S, G, K), cos and sin (positions, K/2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.dot import narrow
from fastbrain.kernels.launch import family_of, launch


@triton.jit
def _turn(
    x_ptr, out_ptr, cos_ptr, sin_ptr, positions_ptr, offset, first, tokens, S, heads,
    b_stride, s_stride, h_stride, HALF: tl.constexpr, BACK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # the first row's token in int64 and once; from there on by small steps
    token = first // heads
    step = (first % heads).to(tl.int32) + tl.arange(0, ROWS)[:, None]
    head = step % heads
    s = (token % S).to(tl.int32) + step // heads
    b = token // S + s // S
    s = s % S
    token += step // heads
    j = tl.arange(0, BLOCK_K)[None, :]
    row = token < tokens
    inside = row & (j < HALF)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + token, mask=row, other=0).to(tl.int64)
    else:
        position = (s + offset).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + j, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + j, mask=inside, other=0.0)
    if BACK:
        sin = -sin
    x_ptr += b * b_stride + s.to(tl.int64) * s_stride + head.to(tl.int64) * h_stride + j
    low = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    out_ptr += (token * heads + head) * (2 * HALF) + j
    kind: tl.constexpr = out_ptr.dtype.scalar.element_ty
    tl.store(out_ptr, narrow(low * cos - high * sin, kind), mask=inside)
    tl.store(out_ptr + HALF, narrow(high * cos + low * sin, kind), mask=inside)


@triton.jit(do_not_specialize=["offset", "tokens", "S", "q_programs"])
def _turn_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, offset, tokens, S,
    q_programs, H, G, q_b, q_s, q_h, k_b, k_s, k_h, HALF: tl.constexpr, BACK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < q_programs:
        first = program.to(tl.int64) * ROWS
        _turn(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, positions_ptr, offset, first, tokens, S, H,
            q_b, q_s, q_h, HALF, BACK, ROWS, BLOCK_K,
        )  # fmt: skip
    else:
        first = (program - q_programs).to(tl.int64) * ROWS
        _turn(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, offset, first, tokens, S, G,
            k_b, k_s, k_h, HALF, BACK, ROWS, BLOCK_K,
        )  # fmt: skip


def _launched(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    back: bool,
) -> tuple[Tensor, Tensor]:
    B, S, H, K = q.shape
    G = k.shape[2]
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    tile = tiles.rotary(family_of(q), K // 2)
    programs = [triton.cdiv(B * S * heads, tile["ROWS"]) for heads in (H, G)]
    launch(
        _turn_kernel, (sum(programs),), q, k, *outs, cos, sin, positions, offset, B * S, S,
        programs[0], H, G, *q.stride()[:3], *k.stride()[:3], HALF=K // 2, BACK=back, **tile,
    )  # fmt: skip
    return outs


def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    return _launched(q, k, cos, sin, positions, offset, False)


def _backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    return _launched(dq, dk, cos, sin, positions, offset, True)


_fwd = torch.library.custom_op("fastbrain::rope_fwd", _forward, mutates_args=())
_bwd = torch.library.custom_op("fastbrain::rope_bwd", _backward, mutates_args=())
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx, inputs, output):
    _, _, cos, sin, positions, ctx.offset = inputs
    ctx.save_for_backward(cos, sin, positions)


def _differentiate(ctx, dq, dk):
    cos, sin, positions = ctx.saved_tensors
    dq, dk = _bwd(dq.contiguous(), dk.contiguous(), cos, sin, positions, ctx.offset)
    return dq, dk, None, None, None, None


_fwd.register_autograd(_differentiate, setup_context=_save)


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int = 0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if positions is not None:
        positions = positions.contiguous()
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    return _fwd(q, k, cos.contiguous(), sin.contiguous(), positions, offset)
