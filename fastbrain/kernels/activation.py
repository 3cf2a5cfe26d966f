"""SwiGLU: silu(gate) * up, where gate and up are the halves of a row.

    y = silu(g) u;  dg = dy u sigma(g) (1 + g (1 - sigma(g)));  du = dy silu(g)

A program owns a block of hidden columns, of as many rows as keep its threads busy; only the input
is saved, and backward computes silu again. Shapes: N rows, F hidden columns; gate_up (N, 2F). All
arithmetic is FP32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.dot import narrow
from fastbrain.kernels.launch import family_of, launch


@triton.jit(do_not_specialize=["N"])
def _fwd_kernel(gate_up_ptr, y_ptr, N, F, stride, ROWS: tl.constexpr, BLOCK_F: tl.constexpr):
    # rows times stride pass 2**31 elements at 64k tokens of a 32k hidden width
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    inside = (n < N) & (f < F)
    gate = tl.load(gate_up_ptr + n * stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n * stride + F + f, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + n * F + f, narrow(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def _bwd_kernel(
    gate_up_ptr, dy_ptr, dgate_up_ptr, N, F, stride, ROWS: tl.constexpr, BLOCK_F: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    inside = (n < N) & (f < F)
    gate = tl.load(gate_up_ptr + n * stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n * stride + F + f, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + n * F + f, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    silu = gate * sigma
    dgate = narrow(dy * up * (sigma + silu * (1 - sigma)), dgate_up_ptr.dtype.element_ty)
    dup = narrow(dy * silu, dgate_up_ptr.dtype.element_ty)
    tl.store(dgate_up_ptr + n * 2 * F + f, dgate, mask=inside)
    tl.store(dgate_up_ptr + n * 2 * F + F + f, dup, mask=inside)


def _forward(gate_up: Tensor) -> Tensor:
    N, width = gate_up.shape
    F = width // 2
    y = gate_up.new_empty(N, F)
    tile = tiles.swiglu(family_of(gate_up), F)
    grid = (triton.cdiv(N, tile["ROWS"]), triton.cdiv(F, tile["BLOCK_F"]))
    launch(_fwd_kernel, grid, gate_up, y, N, F, gate_up.stride(0), **tile)
    return y


def _backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    N, width = gate_up.shape
    F = width // 2
    dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    tile = tiles.swiglu(family_of(gate_up), F)
    grid = (triton.cdiv(N, tile["ROWS"]), triton.cdiv(F, tile["BLOCK_F"]))
    launch(_bwd_kernel, grid, gate_up, dy, dgate_up, N, F, gate_up.stride(0), **tile)
    return dgate_up


_fwd = torch.library.custom_op("fastbrain::activation_fwd", _forward, mutates_args=())
_bwd = torch.library.custom_op("fastbrain::activation_bwd", _backward, mutates_args=())
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy):
    # the gradient of a sum is one number seen through strides of 0
    return _bwd(*ctx.saved_tensors, dy.contiguous())


_fwd.register_autograd(_differentiate, setup_context=_save)


def swiglu(gate_up: Tensor) -> Tensor:
    *lengths, width = gate_up.shape
    rows = gate_up.reshape(math.prod(lengths), width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return _fwd(rows).view(*lengths, width // 2)
