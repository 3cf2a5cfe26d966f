"""Causal attention with grouped query heads: scores never reach memory.

    s_ij = scale q_i . k_j;  p_ij = exp(s_ij - lse_i) over the visible j <= i;  o_i = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i;  ds_ij = p_ij (do_i . v_j - delta_i);  delta_i = do_i . o_i
    dq_i = scale sum_j ds_ij k_j;  dk_j = scale sum_i ds_ij q_i

Forward streams the keys past one block of queries with a running maximum and sum, and keeps the
log-sum-exp of every row, in base 2. Backward rebuilds p from it: one kernel, which also makes
delta, sums over the keys of a query block, and one over the queries of a key block, from all the
heads that read it, so that nothing is added up by atomics. A kernel's loop runs twice: first over
tiles that the diagonal does not cut, which need no mask, then over those that it does. Blocks with
the most tiles start first.

With segments, a query sees from where its document begins, and a key is seen until where it ends;
tiles before the one and past the other are not visited.

Shapes: B sequences, S positions, H query heads in G groups, head width K, padded to WIDTH.
q, out (B, S, H, K); k, v (B, S, G, K); lse, delta (B, H, S) FP32; segments (B, S) int32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.dot import dot, narrow
from fastbrain.kernels.launch import family_of, launch


@triton.jit
def _offsets(stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of a tile's elements from its first one, in 32 bits: its rows lie within 2**31 elements."""
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(ptrs, rows, K: tl.constexpr, TAIL: tl.constexpr):
    """A tile of which `rows` rows (all unless TAIL) and K columns exist; the others are 0."""
    ROWS: tl.constexpr = ptrs.shape[0]
    WIDTH: tl.constexpr = ptrs.shape[1]
    if TAIL:
        inside = tl.arange(0, ROWS)[:, None] < rows
        if K < WIDTH:
            inside = inside & (tl.arange(0, WIDTH)[None, :] < K)
        return tl.load(ptrs, mask=inside, other=0.0)
    if K < WIDTH:
        return tl.load(ptrs, mask=tl.arange(0, WIDTH)[None, :] < K, other=0.0)
    return tl.load(ptrs)


@triton.jit
def _store(ptrs, x, rows, K: tl.constexpr):
    inside = (tl.arange(0, x.shape[0])[:, None] < rows) & (tl.arange(0, x.shape[1])[None, :] < K)
    tl.store(ptrs, narrow(x, ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _count_below(segments_ptr, ids, S):
    """How many of the S segment ids, which never decrease, are below each of `ids`."""
    step = 1
    while step < S:
        step *= 2
    count = tl.zeros(ids.shape, tl.int32)
    while step > 0:
        more = count + step
        below = tl.load(segments_ptr + more - 1, mask=more <= S, other=0) < ids
        count = tl.where((more <= S) & below, more, count)
        step //= 2
    return count


@triton.jit(do_not_specialize=["S"])
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, segments_ptr, out_ptr, lse_ptr, log2_scale, S, H, R,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_g,
    v_stride_b, v_stride_s, v_stride_g,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    first_i = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_I
    i = first_i + tl.arange(0, BLOCK_I)
    start = 0
    if segments_ptr is not None:
        segments_ptr += b * S
        ids = tl.load(segments_ptr + tl.minimum(i, S - 1))
        document = _count_below(segments_ptr, ids, S)  # where a query's begins
        start = tl.min(document) // BLOCK_J * BLOCK_J
    q_ptr += b * q_stride_b + h * q_stride_h + tl.cast(first_i, tl.int64) * q_stride_s
    k_ptr += b * k_stride_b + h // R * k_stride_g
    v_ptr += b * v_stride_b + h // R * v_stride_g
    k_offsets = _offsets(k_stride_s, BLOCK_J, WIDTH)
    v_offsets = _offsets(v_stride_s, BLOCK_J, WIDTH)

    q = _load(q_ptr + _offsets(q_stride_s, BLOCK_I, WIDTH), S - first_i, K, True)
    acc = tl.zeros([BLOCK_I, WIDTH], tl.float32)
    # finite, because a tile may show a row nothing: -inf less -inf is NaN
    peak = tl.full([BLOCK_I], -3e38, tl.float32)
    total = tl.zeros([BLOCK_I], tl.float32)
    stop = first_i
    for DIAGONAL in tl.static_range(2):
        # counted from 0: Triton does not prefetch where the first index comes out of a reduction
        for step in range(0, stop - start, BLOCK_J):
            first_j = start + step
            j = first_j + tl.arange(0, BLOCK_J)
            row = tl.cast(first_j, tl.int64)
            k = _load(k_ptr + row * k_stride_s + k_offsets, S - first_j, K, DIAGONAL)
            s = dot(q, tl.trans(k), None, "ieee") * log2_scale
            if DIAGONAL:
                s = tl.where(i[:, None] >= j, s, float("-inf"))
            if segments_ptr is not None:
                s = tl.where(document[:, None] <= j, s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, 1))
            p = tl.exp2(s - new_peak[:, None])
            # what is already in the sums was scaled by the old peak
            rescale = tl.exp2(peak - new_peak)
            total = total * rescale + tl.sum(p, 1)
            v = _load(v_ptr + row * v_stride_s + v_offsets, S - first_j, K, DIAGONAL)
            acc = dot(narrow(p, v.dtype), v, acc * rescale[:, None], "ieee")
            peak = new_peak
        start = first_i
        stop = first_i + BLOCK_I

    # out is contiguous: positions lie H * K apart
    out_ptr += (b * S + first_i) * H * K + h * K
    _store(out_ptr + _offsets(H * K, BLOCK_I, WIDTH), acc / total[:, None], S - first_i, K)
    tl.store(lse_ptr + (b * H + h) * S + i, peak + tl.log2(total), mask=i < S)


@triton.jit(do_not_specialize=["S"])
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, segments_ptr, out_ptr, lse_ptr, dout_ptr, delta_ptr, dq_ptr,
    scale, log2_scale, S, H, R,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_g,
    v_stride_b, v_stride_s, v_stride_g,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    first_i = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_I
    i = first_i + tl.arange(0, BLOCK_I)
    start = 0
    if segments_ptr is not None:
        segments_ptr += b * S
        ids = tl.load(segments_ptr + tl.minimum(i, S - 1))
        document = _count_below(segments_ptr, ids, S)  # where a query's begins
        start = tl.min(document) // BLOCK_J * BLOCK_J
    q_ptr += b * q_stride_b + h * q_stride_h + tl.cast(first_i, tl.int64) * q_stride_s
    k_ptr += b * k_stride_b + h // R * k_stride_g
    v_ptr += b * v_stride_b + h // R * v_stride_g
    k_offsets = _offsets(k_stride_s, BLOCK_J, WIDTH)
    v_offsets = _offsets(v_stride_s, BLOCK_J, WIDTH)
    # out and its gradient are contiguous: positions lie H * K apart
    base = (b * S + first_i) * H * K + h * K
    offsets = _offsets(H * K, BLOCK_I, WIDTH)

    out = _load(out_ptr + base + offsets, S - first_i, K, True)
    dout = _load(dout_ptr + base + offsets, S - first_i, K, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + (b * H + h) * S + i, delta, mask=i < S)
    lse = tl.load(lse_ptr + (b * H + h) * S + i, mask=i < S, other=float("inf"))
    q = _load(q_ptr + _offsets(q_stride_s, BLOCK_I, WIDTH), S - first_i, K, True)
    dq = tl.zeros([BLOCK_I, WIDTH], tl.float32)
    stop = first_i
    for DIAGONAL in tl.static_range(2):
        for step in range(0, stop - start, BLOCK_J):
            first_j = start + step
            j = first_j + tl.arange(0, BLOCK_J)
            row = tl.cast(first_j, tl.int64)
            k = _load(k_ptr + row * k_stride_s + k_offsets, S - first_j, K, DIAGONAL)
            v = _load(v_ptr + row * v_stride_s + v_offsets, S - first_j, K, DIAGONAL)
            s = dot(q, tl.trans(k), None, "ieee") * log2_scale
            if DIAGONAL:
                s = tl.where(i[:, None] >= j, s, float("-inf"))
            if segments_ptr is not None:
                s = tl.where(document[:, None] <= j, s, float("-inf"))
            p = tl.exp2(s - lse[:, None])
            ds = p * (dot(dout, tl.trans(v), None, "ieee") - delta[:, None])
            dq = dot(narrow(ds, k.dtype), k, dq, "ieee")
        start = first_i
        stop = first_i + BLOCK_I
    _store(dq_ptr + base + offsets, dq * scale, S - first_i, K)


@triton.jit(do_not_specialize=["S"])
def _bwd_dkv_kernel(
    q_ptr, k_ptr, v_ptr, segments_ptr, lse_ptr, dout_ptr, delta_ptr, dk_ptr, dv_ptr,
    scale, log2_scale, S, H, R,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_g,
    v_stride_b, v_stride_s, v_stride_g,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    G = H // R
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    first_j = tl.program_id(1) * BLOCK_J
    j = first_j + tl.arange(0, BLOCK_J)
    end = S
    if segments_ptr is not None:
        segments_ptr += b * S
        ids = tl.load(segments_ptr + tl.minimum(j, S - 1))
        document = _count_below(segments_ptr, ids.to(tl.int64) + 1, S)  # where a key's ends
        end = tl.max(document)
    k_ptr += b * k_stride_b + g * k_stride_g + tl.cast(first_j, tl.int64) * k_stride_s
    v_ptr += b * v_stride_b + g * v_stride_g + tl.cast(first_j, tl.int64) * v_stride_s
    q_ptr += b * q_stride_b + g * R * q_stride_h
    # dout is contiguous: positions lie H * K apart
    dout_ptr += b * S * H * K + g * R * K
    lse_ptr += (b * H + g * R) * S
    delta_ptr += (b * H + g * R) * S
    q_offsets = _offsets(q_stride_s, BLOCK_I, WIDTH)
    dout_offsets = _offsets(H * K, BLOCK_I, WIDTH)

    k = _load(k_ptr + _offsets(k_stride_s, BLOCK_J, WIDTH), S - first_j, K, True)
    v = _load(v_ptr + _offsets(v_stride_s, BLOCK_J, WIDTH), S - first_j, K, True)
    dk = tl.zeros([BLOCK_J, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_J, WIDTH], tl.float32)
    start = first_j + BLOCK_J
    blocks = tl.cdiv(tl.maximum(end - start, 0), BLOCK_I)
    for DIAGONAL in tl.static_range(2):
        # the heads of the group and the query blocks in one loop: nested, they need more registers
        for n in range(0, R * blocks):
            head = tl.cast(n // blocks, tl.int64)
            first_i = start + n % blocks * BLOCK_I
            i = first_i + tl.arange(0, BLOCK_I)
            row = tl.cast(first_i, tl.int64)
            q_ptrs = q_ptr + head * q_stride_h + row * q_stride_s + q_offsets
            q = _load(q_ptrs, S - first_i, K, True)
            # keys by queries: p and ds go from one product into the next without a transpose
            s = dot(k, tl.trans(q), None, "ieee") * log2_scale
            if DIAGONAL:
                s = tl.where(i >= j[:, None], s, float("-inf"))
            if segments_ptr is not None:
                s = tl.where(i < document[:, None], s, float("-inf"))
            # past S every p is 0
            lse = tl.load(lse_ptr + head * S + i, mask=i < S, other=float("inf"))
            p = tl.exp2(s - lse)
            dout = _load(dout_ptr + (row * H + head) * K + dout_offsets, S - first_i, K, True)
            dv = dot(narrow(p, dout.dtype), dout, dv, "ieee")
            delta = tl.load(delta_ptr + head * S + i, mask=i < S, other=0.0)
            ds = p * (dot(v, tl.trans(dout), None, "ieee") - delta)
            dk = dot(narrow(ds, q.dtype), q, dk, "ieee")
        start = first_j
        blocks = BLOCK_J // BLOCK_I
    # dk and dv are contiguous: positions lie G * K apart
    base = (b * S + first_j) * G * K + g * K
    offsets = _offsets(G * K, BLOCK_J, WIDTH)
    _store(dk_ptr + base + offsets, dk * scale, S - first_j, K)
    _store(dv_ptr + base + offsets, dv, S - first_j, K)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    B, S, H, K = q.shape
    out = q.new_empty(B, S, H, K)
    lse = q.new_empty(B, H, S, dtype=torch.float32)
    tile = tiles.attention_fwd(family_of(q), K, q.itemsize)
    launch(
        _fwd_kernel,
        (B * H, triton.cdiv(S, tile["BLOCK_I"])),
        *(q, k, v, segments, out, lse, scale * math.log2(math.e), S, H, H // k.shape[2]),
        *_strides(q, k, v),
        **_widths(K),
        **tile,
    )
    return out, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, H, K = q.shape
    G = k.shape[2]
    delta = torch.empty_like(lse)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    numbers = (scale, scale * math.log2(math.e), S, H, H // G, *_strides(q, k, v))
    tile = tiles.attention_bwd_dq(family_of(q), K, q.itemsize)
    # writes delta, which the other kernel reads
    launch(
        _bwd_dq_kernel,
        (B * H, triton.cdiv(S, tile["BLOCK_I"])),
        *(q, k, v, segments, out, lse, dout, delta, dq),
        *numbers,
        **_widths(K),
        **tile,
    )
    tile = tiles.attention_bwd_dkv(family_of(q), K, q.itemsize)
    launch(
        _bwd_dkv_kernel,
        (B * G, triton.cdiv(S, tile["BLOCK_J"])),
        *(q, k, v, segments, lse, dout, delta, dk, dv),
        *numbers,
        **_widths(K),
        **tile,
    )
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _widths(K: int) -> dict[str, int]:
    return {"K": K, "WIDTH": triton.next_power_of_2(K)}


_fwd = torch.library.custom_op("fastbrain::attention_fwd", _forward, mutates_args=())
_bwd = torch.library.custom_op("fastbrain::attention_bwd", _backward, mutates_args=())
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx, inputs, output):
    q, k, v, segments, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, segments, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, dout, _dlse):
    # the gradient of a sum is one number seen through strides of 0
    dq, dk, dv = _bwd(*ctx.saved_tensors, dout.contiguous(), ctx.scale)
    return dq, dk, dv, None, None


_fwd.register_autograd(_differentiate, setup_context=_save)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, segments: Tensor | None = None
) -> Tensor:
    K = q.shape[3]
    if K not in tiles.HEAD_WIDTHS:
        raise ValueError(f"head width must be one of {tiles.HEAD_WIDTHS} in `fused`, got {K}")
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    segments = None if segments is None else segments.contiguous()
    out, _lse = _fwd(q, k, v, segments, K**-0.5 if scale is None else scale)
    return out
