"""RMSNorm of the residual stream after something was added to it.

    h = x + residual;  r = 1 / sqrt(mean(h^2) + eps);  y = h r w
    dh = r (dy w - h r^2 mean(dy w h)) + dnew;  dw = sum over rows of dy h r

A program holds whole rows in registers. Backward reads h and r, and runs on a fixed number of
programs, each of which sums dw over its rows; a second launch adds those partial sums in order, so
that equal inputs give equal bits. Shapes: N rows, D columns; x, residual and h (N, D), weight (D),
r (N). All arithmetic is FP32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.dot import narrow
from fastbrain.kernels.launch import family_of, launch


@triton.jit(do_not_specialize=["N"])
def _fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, rstd_ptr, eps, N, D, x_stride, residual_stride,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (n < N) & (d < D)
    h = tl.load(x_ptr + n * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + n * residual_stride + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + n * D + d, narrow(h, h_ptr.dtype.element_ty), mask=inside)
    mean_square = tl.sum(h * h, axis=1, keep_dims=True) / D
    # exact, because every element of the row and its gradient is multiplied by it
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    tl.store(rstd_ptr + n, rstd, mask=n < N)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + n * D + d, narrow(h * rstd * weight, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def _bwd_kernel(
    dy_ptr, dnew_ptr, h_ptr, weight_ptr, rstd_ptr, dx_ptr, dresidual_ptr, partial_ptr, N, D,
    h_stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)[None, :]
    dweight = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in range(tl.program_id(0) * ROWS, N, PROGRAMS * ROWS):
        n = tl.cast(first, tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (n < N) & (d < D)
        h = tl.load(h_ptr + n * h_stride + d, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + n * D + d, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + n, mask=n < N, other=0.0)
        if dnew_ptr is not None:
            # early, because loads that wait together wait once
            dnew = tl.load(dnew_ptr + n * D + d, mask=inside, other=0.0)
        unit = h * rstd
        # read again for every row, from the cache: registers are what a wide row lacks
        dunit = dy * tl.load(weight_ptr + d, mask=d < D, other=0.0)
        dh = rstd * (dunit - unit * (tl.sum(dunit * unit, axis=1, keep_dims=True) / D))
        if dnew_ptr is not None:
            dh += dnew.to(tl.float32)
        tl.store(dx_ptr + n * D + d, narrow(dh, dx_ptr.dtype.element_ty), mask=inside)
        if dresidual_ptr is not None:
            dh = narrow(dh, dresidual_ptr.dtype.element_ty)
            tl.store(dresidual_ptr + n * D + d, dh, mask=inside)
        dweight += dy * unit
    columns = tl.arange(0, BLOCK_D)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * D + columns
    tl.store(at, tl.sum(dweight, axis=0), mask=columns < D)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(partial_ptr, dweight_ptr, rows, D, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None]
        inside = (row < rows) & (d < D)[None, :]
        total += tl.load(partial_ptr + row * D + d[None, :], mask=inside, other=0.0)
    tl.store(dweight_ptr + d, tl.sum(total, axis=0), mask=d < D)


def _forward(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    N, D = x.shape
    y = torch.empty(N, D, dtype=dtype, device=x.device)
    h = x.new_empty(0) if residual is None else residual.new_empty(N, D)
    rstd = torch.empty(N, dtype=torch.float32, device=x.device)
    tile = tiles.rms_norm_fwd(family_of(x), D)
    stride = D if residual is None else residual.stride(0)
    launch(
        _fwd_kernel, (triton.cdiv(N, tile["ROWS"]),), x, residual, weight, y,
        None if residual is None else h, rstd, eps, N, D, x.stride(0), stride, **tile,
    )  # fmt: skip
    return y, h, rstd


def _backward(
    dy: Tensor,
    dnew: Tensor | None,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the gradient of the residual where it is not the same tensor, and dweight."""
    N, D = h.shape
    dx = torch.empty(N, D, dtype=x_dtype, device=h.device)
    same = residual_dtype == x_dtype
    dresidual = torch.empty(0 if same else (N, D), dtype=residual_dtype, device=h.device)
    family = family_of(h)
    tile = tiles.rms_norm_bwd(family, D)
    programs = min(tile["PROGRAMS"], triton.cdiv(N, tile["ROWS"]))
    partial = torch.empty(programs, D, dtype=torch.float32, device=h.device)
    launch(
        _bwd_kernel, (programs,), dy, dnew, h, weight, rstd, dx, None if same else dresidual,
        partial, N, D, h.stride(0), **tile,
    )  # fmt: skip
    dweight = torch.empty_like(weight)
    tile = tiles.rms_norm_sum(family)
    grid = (triton.cdiv(D, tile["BLOCK_D"]),)
    launch(_sum_kernel, grid, partial, dweight, programs, D, **tile)
    return dx, dresidual, dweight


_fwd = torch.library.custom_op("fastbrain::norm_fwd", _forward, mutates_args=())
_bwd = torch.library.custom_op("fastbrain::norm_bwd", _backward, mutates_args=())
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx, inputs, output):
    x, weight, _, residual, _ = inputs
    _, h, rstd = output
    ctx.save_for_backward(x if residual is None else h, weight, rstd)
    ctx.x_dtype = x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    # the stream of a last norm goes nowhere: its gradient need not be read
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dnew, _):
    h, weight, rstd = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy.contiguous()
    if ctx.residual_dtype is None:
        dnew = None
    dnew = dnew if dnew is None else dnew.contiguous()
    x_dtype, residual_dtype = ctx.x_dtype, ctx.residual_dtype or ctx.x_dtype
    dx, dresidual, dweight = _bwd(dy, dnew, h, weight, rstd, x_dtype, residual_dtype)
    if residual_dtype == x_dtype:
        dresidual = dx
    return dx, dweight, None, None if ctx.residual_dtype is None else dresidual, None


_fwd.register_autograd(_differentiate, setup_context=_save)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    x_rows = _rows(x)
    residual_rows = None if residual is None else _rows(residual)
    y, h, _ = _fwd(x_rows, weight.contiguous(), eps, residual_rows, dtype or x.dtype)
    return y, x if residual is None else h


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
