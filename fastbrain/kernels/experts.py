"""What an expert FFN does beside plain products of grouped rows: its SwiGLU, its gates, its tokens.

    (g, u) = w_gate_up[e] x_t;  a = silu(g) u;  y_t = sum_j s_tj y_row
    da = s da', da' = w_down[e]^T dy_t;  ds = <da', a>
    dg = da u sigma(g) (1 + g (1 - sigma(g)));  du = da silu(g)

The SwiGLU and its derivative are epilogues of the products that precede them. The gate's gradient
needs no expert output: every block of hidden columns leaves its part of <da', a>, and the parts are
added in order. A token's rows are added in the order of its choices, whatever their experts.

Shapes: N tokens, k choices, E experts, D width, F hidden width; rows sorted by expert (`routing`).
"""

import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.dot import dot, narrow
from fastbrain.kernels.launch import family_of, launch
from fastbrain.kernels.routing import Routing, load_tile


@triton.jit(do_not_specialize=["num_tiles"])
def _hidden_kernel(
    x_ptr,
    w_ptr,
    gate_up_ptr,
    hidden_ptr,
    slots_ptr,
    tiles_ptr,
    num_tiles,
    E,
    D,
    F,
    stride,
    CHOICES: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # all columns of a block of rows before the next, so that an expert's weight stays in L2
    blocks_f = tl.cdiv(F, BLOCK_F)
    e, first, left = load_tile(tiles_ptr, num_tiles, tl.program_id(0) // blocks_f)
    if (left <= 0) | (e >= E):
        return
    m = tl.arange(0, BLOCK_M)
    f = (tl.program_id(0) % blocks_f) * BLOCK_F + tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    # a row past the end is read as the last one and never written
    token = tl.load(slots_ptr + first + tl.minimum(m, left - 1)) // CHOICES
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * stride + d[None, :]
    gate_ptrs = w_ptr + e * 2 * F * D + f[None, :] * D + d[:, None]
    up_ptrs = gate_ptrs + F * D
    gate = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for start in range(0, D, BLOCK_D):
        if EVEN:
            x = tl.load(x_ptrs)
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
        else:
            inside = (start + d[:, None] < D) & (f[None, :] < F)
            x = tl.load(x_ptrs, mask=start + d[None, :] < D, other=0.0)
            w_gate = tl.load(gate_ptrs, mask=inside, other=0.0)
            w_up = tl.load(up_ptrs, mask=inside, other=0.0)
        gate = dot(x, w_gate, gate, "ieee")
        up = dot(x, w_up, up, "ieee")
        x_ptrs += BLOCK_D
        gate_ptrs += BLOCK_D
        up_ptrs += BLOCK_D
    inside = m[:, None] < left
    if not EVEN:
        inside = inside & (f[None, :] < F)
    if SAVE:
        gate_up_ptrs = gate_up_ptr + first * 2 * F + m[:, None] * 2 * F + f[None, :]
        tl.store(gate_up_ptrs, narrow(gate, gate_up_ptr.dtype.element_ty), mask=inside)
        tl.store(gate_up_ptrs + F, narrow(up, gate_up_ptr.dtype.element_ty), mask=inside)
    hidden_ptrs = hidden_ptr + first * F + m[:, None] * F + f[None, :]
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptrs, narrow(hidden, hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _hidden_grad(
    dhidden, weight, m, f, inside, gate_up_ptr, dgate_up_ptr, scaled_ptr, F, GATE_UP, SCALED
):
    """Writes d(g, u) and s a of some hidden columns, and returns their part of <da', a>."""
    at = m[:, None] * 2 * F + f[None, :]
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    silu = gate * sigma
    part = tl.sum(dhidden * silu * up, 1)
    if SCALED:
        scaled = narrow(weight * silu * up, scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + m[:, None] * F + f[None, :], scaled, mask=inside)
    if GATE_UP:
        dhidden *= weight
        dgate = dhidden * up * (sigma + silu * (1 - sigma))
        dup = dhidden * silu
        tl.store(dgate_up_ptr + at, narrow(dgate, dgate_up_ptr.dtype.element_ty), mask=inside)
        tl.store(dgate_up_ptr + at + F, narrow(dup, dgate_up_ptr.dtype.element_ty), mask=inside)
    return part


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def _hidden_grad_kernel(
    dy_ptr,
    w_ptr,
    gate_up_ptr,
    gates_ptr,
    dgate_up_ptr,
    scaled_ptr,
    parts_ptr,
    slots_ptr,
    tiles_ptr,
    num_tiles,
    num_rows,
    E,
    D,
    F,
    CHOICES: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE_UP: tl.constexpr,
    SCALED: tl.constexpr,
    GATES: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """da' of a block, then d(g, u), s a and the gates' gradient, as far as wanted."""
    blocks_f = tl.cdiv(F, BLOCK_F)
    column = tl.program_id(0) % blocks_f
    e, first, left = load_tile(tiles_ptr, num_tiles, tl.program_id(0) // blocks_f)
    if (left <= 0) | (e >= E):
        return
    m = tl.arange(0, BLOCK_M)
    f = column * BLOCK_F + tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + first + tl.minimum(m, left - 1))
    dy_ptrs = dy_ptr + (slot // CHOICES).to(tl.int64)[:, None] * D + d[None, :]
    w_ptrs = w_ptr + e * D * F + d[:, None] * F + f[None, :]
    dhidden = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    if PRODUCT:
        for start in range(0, D, BLOCK_D):
            if EVEN:
                dy = tl.load(dy_ptrs)
                w = tl.load(w_ptrs)
            else:
                dy = tl.load(dy_ptrs, mask=start + d[None, :] < D, other=0.0)
                w = tl.load(w_ptrs, mask=(start + d[:, None] < D) & (f[None, :] < F), other=0.0)
            dhidden = dot(dy, w, dhidden, "ieee")
            dy_ptrs += BLOCK_D
            w_ptrs += BLOCK_D * F
    weight = tl.load(gates_ptr + slot)[:, None]
    gate_up_ptr += first * 2 * F
    dgate_up_ptr += first * 2 * F
    scaled_ptr += first * F
    # in two halves of the columns: whole, the epilogue takes all the registers there are
    low, high = tl.split(dhidden.reshape(BLOCK_M, 2, BLOCK_F // 2).permute(0, 2, 1))
    f = column * BLOCK_F + tl.arange(0, BLOCK_F // 2)
    inside = (m[:, None] < left) & (EVEN | (f[None, :] < F))
    part = _hidden_grad(
        low, weight, m, f, inside, gate_up_ptr, dgate_up_ptr, scaled_ptr, F, GATE_UP, SCALED
    )
    f += BLOCK_F // 2
    inside = (m[:, None] < left) & (EVEN | (f[None, :] < F))
    part += _hidden_grad(
        high, weight, m, f, inside, gate_up_ptr, dgate_up_ptr, scaled_ptr, F, GATE_UP, SCALED
    )
    if GATES:
        tl.store(parts_ptr + column.to(tl.int64) * num_rows + first + m, part, mask=m < left)


@triton.jit(do_not_specialize=["num_rows"])
def _gates_grad_kernel(parts_ptr, rows_ptr, dgates_ptr, num_rows, num_parts, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_rows
    row = tl.load(rows_ptr + slot, mask=inside, other=-1)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        part_ptr = parts_ptr + tl.cast(part, tl.int64) * num_rows
        total += tl.load(part_ptr + row, mask=row >= 0, other=0.0)
    tl.store(dgates_ptr + slot, total, mask=inside)


@triton.jit
def _tokens_kernel(
    y_ptr,
    rows_ptr,
    gates_ptr,
    out_ptr,
    D,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out_t = sum_j s_tj y[row of slot t, j] in order of j; without gates every s is 1."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(CHOICES):
        row = tl.load(rows_ptr + t * CHOICES + j).to(tl.int64)
        y = tl.load(y_ptr + row * D + d, mask=d < tl.where(row >= 0, D, 0), other=0.0).to(
            tl.float32
        )
        if WEIGHTED:
            # a gate without an expert may hold anything, and 0 times infinity is not 0
            y *= tl.load(gates_ptr + t * CHOICES + j, mask=row >= 0, other=0.0)
        total += y
    tl.store(out_ptr + t * D + d, narrow(total, out_ptr.dtype.element_ty), mask=d < D)


def hidden_rows(
    x: Tensor, w_gate_up: Tensor, routing: Routing, save: bool
) -> tuple[Tensor, Tensor]:
    """(g, u) of every row, empty unless saved, and silu(g) u."""
    E, F2, D = w_gate_up.shape
    F, (N, k) = F2 // 2, routing.rows.shape
    gate_up = x.new_empty(N * k if save else 0, F2)
    hidden = x.new_empty(N * k, F)
    tile = tiles.expert_hidden(family_of(x), x.element_size())
    flags = {"CHOICES": k, "SAVE": save, "EVEN": _even(D, F, tile)}
    num_tiles = routing.tiles.shape[1]
    tensors = x, w_gate_up, gate_up, hidden, routing.slots, routing.tiles
    grid = _grid(num_tiles, F, tile)
    sizes = num_tiles, E, D, F, x.stride(0)
    launch(_hidden_kernel, grid, *tensors, *sizes, **flags, **tile)
    return gate_up, hidden


def hidden_grads(
    dy: Tensor,
    w_down: Tensor,
    gate_up: Tensor,
    gates: Tensor,
    routing: Routing,
    wants_gate_up: bool,
    wants_scaled: bool,
    wants_gates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """d(g, u) and s a of every row, and the gates' gradient; empty where not wanted."""
    E, D, F = w_down.shape
    N, k = gates.shape
    dgate_up = gate_up.new_empty(N * k if wants_gate_up else 0, 2 * F)
    scaled = gate_up.new_empty(N * k if wants_scaled else 0, F)
    tile = tiles.expert_hidden_grad(family_of(dy), dy.element_size())
    num_parts = triton.cdiv(F, tile["BLOCK_F"])
    parts = gates.new_empty(num_parts if wants_gates else 0, N * k)
    flags = {
        "CHOICES": k,
        "PRODUCT": wants_gate_up or wants_gates,
        "GATE_UP": wants_gate_up,
        "SCALED": wants_scaled,
        "GATES": wants_gates,
        "EVEN": _even(D, F, tile),
    }
    num_tiles = routing.tiles.shape[1]
    tensors = dy, w_down, gate_up, gates, dgate_up, scaled, parts, routing.slots, routing.tiles
    grid = _grid(num_tiles, F, tile)
    launch(_hidden_grad_kernel, grid, *tensors, num_tiles, N * k, E, D, F, **flags, **tile)
    dgates = gates.new_empty(N if wants_gates else 0, k)
    if wants_gates:
        tile = tiles.gates_grad(family_of(dy))
        grid = (triton.cdiv(N * k, tile["BLOCK"]),)
        launch(_gates_grad_kernel, grid, parts, routing.rows, dgates, N * k, num_parts, **tile)
    return dgate_up, scaled, dgates


def sum_by_token(y: Tensor, rows: Tensor, gates: Tensor | None) -> Tensor:
    """Each token's sum of its rows of y, weighted by gates if given."""
    (N, k), D = rows.shape, y.shape[1]
    out = y.new_empty(N, D)
    tile = tiles.sum_by_token(family_of(y), D, y.element_size())
    flags = {"CHOICES": k, "WEIGHTED": gates is not None}
    grid = (N, triton.cdiv(D, tile["BLOCK"]))
    launch(_tokens_kernel, grid, y, rows, gates, out, D, **flags, **tile)
    return out


def _even(D: int, F: int, tile: tiles.Tile) -> bool:
    return D % tile["BLOCK_D"] == 0 and F % tile["BLOCK_F"] == 0


def _grid(num_tiles: int, F: int, tile: tiles.Tile) -> tuple[int]:
    return (num_tiles * triton.cdiv(F, tile["BLOCK_F"]),)
