"""Matrix products of rows sorted by group, each with its own group's weight, and the expert FFN.

    grouped_matmul: y_m = w[e] x_m                    for rows m of group e
    expert_ffn:     y_t = sum_j s_tj w_down[e] a_tj,  a_tj = silu(g) u,  (g, u) = w_gate_up[e] x_t

A program takes one block of rows of one group, by a map made on the device (`routing`), times one
block of columns. The FFN's forward is three kernels: hidden rows a from gathered tokens, their
product with w_down, and each token's weighted sum of its rows. Backward recomputes a from the saved
(g, u), so x, (g, u) and the routing tables are all that is kept; da, whose inner product with a is
the gate's gradient, gives d(g, u) in its own epilogue, and the weights' gradients gather x and dy
as they are multiplied.

Shapes: N tokens, k choices, E groups, D width, F hidden width; M rows sorted by group; C outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import experts, tiles
from fastbrain.kernels.dot import dot, narrow
from fastbrain.kernels.launch import family_of, launch
from fastbrain.kernels.routing import Routing, load_tile, map_tiles, route


@triton.jit(do_not_specialize=["num_tiles"])
def _rows_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    tiles_ptr,
    num_tiles,
    E,
    C,
    D,
    x_stride,
    w_stride_e,
    w_stride_c,
    w_stride_d,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y_mc = sum_d x_md w[e, c, d]; rows past the last group are 0."""
    # all columns of a block of rows before the next, so that a group's weight stays in L2
    blocks_c = tl.cdiv(C, BLOCK_C)
    e, first, left = load_tile(tiles_ptr, num_tiles, tl.program_id(0) // blocks_c)
    if left <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    c = (tl.program_id(0) % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    # a row past the end is read as the last one and never written
    x_ptrs = x_ptr + (first + tl.minimum(m, left - 1))[:, None] * x_stride + d[None, :]
    w_ptrs = w_ptr + e * w_stride_e + c[None, :] * w_stride_c + d[:, None] * w_stride_d
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, tl.where(e < E, D, 0), BLOCK_D):
        if EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=start + d[None, :] < D, other=0.0)
            w = tl.load(w_ptrs, mask=(start + d[:, None] < D) & (c[None, :] < C), other=0.0)
        acc = dot(x, w, acc, "ieee")
        x_ptrs += BLOCK_D
        w_ptrs += BLOCK_D * w_stride_d
    inside = (m[:, None] < left) & (EVEN | (c[None, :] < C))
    y_ptrs = y_ptr + first * C + m[:, None] * C + c[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _weights_kernel(
    dy_ptr,
    x_ptr,
    dw_ptr,
    slots_ptr,
    offsets_ptr,
    order_ptr,
    num_rows,
    C,
    D,
    x_stride,
    CHOICES: tl.constexpr,
    GATHER_DY: tl.constexpr,
    GATHER_X: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dw[e, c, d] = sum_m dy_mc x_md over the rows of e; a gathered operand has a row per token."""
    blocks_c, blocks_d = tl.cdiv(C, BLOCK_C), tl.cdiv(D, BLOCK_D)
    # the longest sums first: what runs last decides how long the card is half idle
    e = tl.load(order_ptr + tl.program_id(0) // (blocks_c * blocks_d))
    block = tl.program_id(0) % (blocks_c * blocks_d)
    c = (block // blocks_d) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = (block % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(offsets_ptr + e)
    end = tl.minimum(tl.load(offsets_ptr + e + 1), num_rows)
    acc = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = m[:, None] < end
        row = m.to(tl.int64)
        token = row
        if GATHER_DY or GATHER_X:
            token = (tl.load(slots_ptr + m, mask=m < end, other=0) // CHOICES).to(tl.int64)
        dy_ptrs = dy_ptr + (token if GATHER_DY else row)[:, None] * C + c[None, :]
        x_ptrs = x_ptr + (token if GATHER_X else row)[:, None] * x_stride + d[None, :]
        dy = tl.load(dy_ptrs, mask=inside & (EVEN | (c[None, :] < C)), other=0.0)
        x = tl.load(x_ptrs, mask=inside & (EVEN | (d[None, :] < D)), other=0.0)
        acc = dot(tl.trans(dy), x, acc, "ieee")
    dw_ptrs = dw_ptr + e.to(tl.int64) * C * D + c[:, None] * D + d[None, :]
    inside = EVEN | ((c[:, None] < C) & (d[None, :] < D))
    tl.store(dw_ptrs, narrow(acc, dw_ptr.dtype.element_ty), mask=inside)


def _rows(x: Tensor, w: Tensor, tile_map: Tensor) -> Tensor:
    """Rows x (M, D), each times its group's matrix of w (E, C, D), whatever the strides of w."""
    E, C, D = w.shape
    y = x.new_empty(x.shape[0], C)
    tile = tiles.group_rows(family_of(x), x.element_size())
    even = C % tile["BLOCK_C"] == 0 and D % tile["BLOCK_D"] == 0
    num_tiles = tile_map.shape[1]
    grid = (num_tiles * triton.cdiv(C, tile["BLOCK_C"]),)
    sizes = num_tiles, E, C, D, x.stride(0), *w.stride()
    launch(_rows_kernel, grid, x, w, y, tile_map, *sizes, EVEN=even, **tile)
    return y


def _weights(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    order: Tensor,
    dtype: torch.dtype,
    routing: Routing | None = None,
    gathered: Tensor | None = None,
) -> Tensor:
    """dy^T x of every group; of the two, `gathered` has rows of tokens, the other sorted rows."""
    E, C, D = offsets.shape[0] - 1, dy.shape[1], x.shape[1]
    dw = x.new_empty(E, C, D, dtype=dtype)
    tile = tiles.group_weights(family_of(x), x.element_size(), gathers=routing is not None)
    flags = {
        "CHOICES": routing.rows.shape[1] if routing else 1,
        "GATHER_DY": gathered is dy,
        "GATHER_X": gathered is x,
        "EVEN": C % tile["BLOCK_C"] == 0 and D % tile["BLOCK_D"] == 0,
    }
    num_rows = (x if gathered is dy else dy).shape[0]
    grid = (E * triton.cdiv(C, tile["BLOCK_C"]) * triton.cdiv(D, tile["BLOCK_D"]),)
    slots = routing.slots if routing else None
    tensors = dy, x, dw, slots, offsets, order
    launch(_weights_kernel, grid, *tensors, num_rows, C, D, x.stride(0), **flags, **tile)
    return dw


def _matmul_forward(
    x: Tensor, w: Tensor, offsets: Tensor, shadow: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tile_map, order = map_tiles(offsets, x.shape[0], x.dtype)
    return _rows(x, w if shadow is None else shadow, tile_map), tile_map, order


def _matmul_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    tile_map: Tensor,
    order: Tensor,
    dtype: torch.dtype,
    wants_x: bool,
    wants_w: bool,
) -> tuple[Tensor, Tensor]:
    dx = _rows(dy, w.mT, tile_map) if wants_x else x.new_empty(0)
    dw = _weights(dy, x, offsets, order, dtype) if wants_w else w.new_empty(0)
    return dx, dw


_matmul_fwd = torch.library.custom_op(
    "fastbrain::grouped_matmul_fwd", _matmul_forward, mutates_args=()
)
_matmul_bwd = torch.library.custom_op(
    "fastbrain::grouped_matmul_bwd", _matmul_backward, mutates_args=()
)
_matmul_fwd.register_fake(_matmul_forward)
_matmul_bwd.register_fake(_matmul_backward)


def _matmul_save(ctx, inputs, output):
    x, w, offsets, shadow = inputs
    ctx.dtype = w.dtype
    _, *tables = output
    ctx.save_for_backward(x, w if shadow is None else shadow, offsets, *tables)
    ctx.set_materialize_grads(False)


def _matmul_differentiate(ctx, dy, *_):
    wants_x, wants_w, *_ = ctx.needs_input_grad
    grads = _matmul_bwd(dy.contiguous(), *ctx.saved_tensors, ctx.dtype, wants_x, wants_w)
    dx, dw = (g if wanted else None for g, wanted in zip(grads, (wants_x, wants_w), strict=True))
    return dx, dw, None, None


_matmul_fwd.register_autograd(_matmul_differentiate, setup_context=_matmul_save)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, shadow: Tensor | None = None) -> Tensor:
    y, *_ = _matmul_fwd(_packed(x), w, offsets.contiguous(), shadow)
    return y


def _ffn_forward(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    gate_up_shadow: Tensor | None,
    down_shadow: Tensor | None,
    expert_ids: Tensor,
    gates: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    routing = route(expert_ids, w_gate_up.shape[0], x.dtype)
    w_gate_up = w_gate_up if gate_up_shadow is None else gate_up_shadow
    w_down = w_down if down_shadow is None else down_shadow
    gate_up, hidden = experts.hidden_rows(x, w_gate_up, routing, save)
    y = experts.sum_by_token(_rows(hidden, w_down, routing.tiles), routing.rows, gates)
    return y, gate_up, *routing


def _ffn_backward(
    dy: Tensor,
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    gates: Tensor,
    gate_up: Tensor,
    rows: Tensor,
    slots: Tensor,
    offsets: Tensor,
    tile_map: Tensor,
    order: Tensor,
    gate_up_dtype: torch.dtype,
    down_dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routing = Routing(rows, slots, offsets, tile_map, order)
    wants_x, wants_gate_up, wants_down, wants_gates = wanted
    dgate_up, scaled, dgates = experts.hidden_grads(
        dy, w_down, gate_up, gates, routing, wants_x or wants_gate_up, wants_down, wants_gates
    )
    dx, dw_gate_up, dw_down = (x.new_empty(0) for _ in range(3))
    if wants_down:
        dw_down = _weights(dy, scaled, offsets, order, down_dtype, routing, gathered=dy)
    if wants_gate_up:
        dw_gate_up = _weights(dgate_up, x, offsets, order, gate_up_dtype, routing, gathered=x)
    if wants_x:
        dx = experts.sum_by_token(_rows(dgate_up, w_gate_up.mT, tile_map), rows, None)
    return dx, dw_gate_up, dw_down, dgates


_ffn_fwd = torch.library.custom_op("fastbrain::expert_ffn_fwd", _ffn_forward, mutates_args=())
_ffn_bwd = torch.library.custom_op("fastbrain::expert_ffn_bwd", _ffn_backward, mutates_args=())
_ffn_fwd.register_fake(_ffn_forward)
_ffn_bwd.register_fake(_ffn_backward)


def _ffn_save(ctx, inputs, output):
    x, w_gate_up, w_down, gate_up_shadow, down_shadow, _, gates, _ = inputs
    _, *kept = output
    ctx.dtypes = w_gate_up.dtype, w_down.dtype
    w_gate_up = w_gate_up if gate_up_shadow is None else gate_up_shadow
    w_down = w_down if down_shadow is None else down_shadow
    ctx.save_for_backward(x, w_gate_up, w_down, gates, *kept)
    # or PyTorch would write zeros for the gradient of (g, u), the largest of the outputs
    ctx.set_materialize_grads(False)


def _ffn_differentiate(ctx, dy, *_):
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[2], needs[6]]
    grads = _ffn_bwd(dy.contiguous(), *ctx.saved_tensors, *ctx.dtypes, wanted)
    dx, dw_gate_up, dw_down, dgates = (
        g if want else None for g, want in zip(grads, wanted, strict=True)
    )
    return dx, dw_gate_up, dw_down, None, None, None, dgates, None


_ffn_fwd.register_autograd(_ffn_differentiate, setup_context=_ffn_save)


def expert_ffn(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    shadows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    differentiable = (x, w_gate_up, w_down, gates)
    save = torch.is_grad_enabled() and any(a.requires_grad for a in differentiable)
    gate_up_shadow, down_shadow = (s.contiguous() for s in shadows) if shadows else (None, None)
    weights = w_gate_up.contiguous(), w_down.contiguous(), gate_up_shadow, down_shadow
    y, *_ = _ffn_fwd(_packed(x), *weights, expert_ids.contiguous(), gates.contiguous(), save)
    return y


def _packed(x: Tensor) -> Tensor:
    """x with its columns side by side; its rows may lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()
