"""Masked cross-entropy that never writes a softmax to memory.

    loss_n = log sum_v exp(x_nv) - x_n,target;  dx_nv = (exp(x_nv - log sum) - [v = target]) dloss

A program owns one row. Its first pass keeps a running peak and sum in every lane of a block; they
meet only at the row's end, so that a block costs no exchange between warps. The second pass
computes each probability again from the saved peak and sum. Rows that do not count are never read.

Shapes: N rows, V columns; logits (N, V), targets (N), mask (N). All arithmetic is FP32. The two
passes are also those of `chunked_head`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbrain.kernels import tiles
from fastbrain.kernels.dot import narrow
from fastbrain.kernels.launch import family_of, launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# below every finite logit, and unlike -inf it may be subtracted from itself
FLOOR = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def row_loss(row_ptr, on, target, V, width, BLOCK: tl.constexpr):
    """(loss, peak, log2 of the sum above the peak) of a row; 0 where `on` is false.

    Of the row's `width` columns in memory the first V are logits. Peak and sum stay apart: added
    up, large logits would swallow the sum's digits.
    """
    # a target outside the vocabulary reads NaN instead of memory
    readable = on & (target >= 0) & (target < V)
    at_target = tl.load(row_ptr + target, mask=readable, other=float("nan")).to(tl.float32)
    peaks = tl.full((BLOCK,), FLOOR, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, tl.where(on, width, 0), BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + v, mask=v < width, other=0.0).to(tl.float32)
        x = tl.where(v < V, x, -float("inf"))
        higher = tl.maximum(peaks, x)
        sums = sums * tl.exp2((peaks - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)
        peaks = higher
    peak = tl.max(peaks, 0)
    log_sum = tl.log2(tl.sum(sums * tl.exp2((peaks - peak) * LOG2E), 0))
    return tl.where(on, (peak - at_target) + log_sum * LN2, 0.0), peak, log_sum


@triton.jit
def row_gradient(
    row_ptr, drow_ptr, on, target, dloss, peak, log_sum, V, width, BLOCK: tl.constexpr
):
    """Writes dloss (softmax - onehot), 0 where `on` is false; drow may be the row itself.

    What it leaves in columns from V on means nothing.
    """
    dloss = tl.where((target >= 0) & (target < V), dloss, float("nan"))
    for first in range(0, width, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + v, mask=v < tl.where(on, width, 0), other=0.0).to(tl.float32)
        p = tl.exp2((x - peak) * LOG2E - log_sum)
        dx = tl.where(on, tl.where(v == target, p - 1, p) * dloss, 0.0)
        tl.store(drow_ptr + v, narrow(dx, drow_ptr.dtype.element_ty), mask=v < width)


@triton.jit
def _fwd_kernel(
    logits_ptr, targets_ptr, mask_ptr, losses_ptr, peaks_ptr, log_sums_ptr,
    columns, stride, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # rows times stride pass 2**31 elements at 64k rows of a 64k vocabulary
    n = tl.program_id(0).to(tl.int64)
    on = tl.load(mask_ptr + n)
    target = tl.load(targets_ptr + n)
    row_ptr = logits_ptr + n * stride * VECTOR
    V = columns * VECTOR
    loss, peak, log_sum = row_loss(row_ptr, on, target, V, V, BLOCK)
    tl.store(losses_ptr + n, loss)
    tl.store(peaks_ptr + n, peak)
    tl.store(log_sums_ptr + n, log_sum)


@triton.jit
def _bwd_kernel(
    logits_ptr, targets_ptr, mask_ptr, peaks_ptr, log_sums_ptr, dloss_ptr, dlogits_ptr,
    columns, stride, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    on = tl.load(mask_ptr + n)
    target = tl.load(targets_ptr + n)
    peak = tl.load(peaks_ptr + n)
    log_sum = tl.load(log_sums_ptr + n)
    dloss = tl.load(dloss_ptr)
    V = columns * VECTOR
    row_ptr = logits_ptr + n * stride * VECTOR
    drow_ptr = dlogits_ptr + n * V
    row_gradient(row_ptr, drow_ptr, on, target, dloss, peak, log_sum, V, V, BLOCK)


def _in_vectors(V: int, stride: int) -> tuple[int, int, int]:
    """V and a row stride counted in vectors, and the elements of a vector, at most 8.

    The kernel multiplies them again, which shows the compiler that rows start and end on vectors:
    so it reads and writes them whole, 128 bits at a time.
    """
    vector = math.gcd(8, V, stride)
    return V // vector, stride // vector, vector


def _forward(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    N, V = logits.shape
    losses, peaks, log_sums = (logits.new_empty(N, dtype=torch.float32) for _ in range(3))
    columns, stride, vector = _in_vectors(V, logits.stride(0))
    tile = tiles.masked_cross_entropy(family_of(logits))
    launch(
        _fwd_kernel, (N,), logits, targets, mask, losses, peaks, log_sums,
        columns, stride, VECTOR=vector, **tile,
    )  # fmt: skip
    return losses.sum(), peaks, log_sums


def _backward(
    logits: Tensor, targets: Tensor, mask: Tensor, peaks: Tensor, log_sums: Tensor, dloss: Tensor
) -> Tensor:
    N, V = logits.shape
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    columns, stride, vector = _in_vectors(V, logits.stride(0))
    tile = tiles.masked_cross_entropy(family_of(logits))
    launch(
        _bwd_kernel, (N,), logits, targets, mask, peaks, log_sums, dloss, dlogits,
        columns, stride, VECTOR=vector, **tile,
    )  # fmt: skip
    return dlogits


_fwd = torch.library.custom_op("fastbrain::cross_entropy_fwd", _forward, mutates_args=())
_bwd = torch.library.custom_op("fastbrain::cross_entropy_bwd", _backward, mutates_args=())
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx, inputs, output):
    _, peaks, log_sums = output
    ctx.mark_non_differentiable(peaks, log_sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, peaks, log_sums)


def _differentiate(ctx, dloss, _dpeaks, _dlog_sums):
    return _bwd(*ctx.saved_tensors, dloss), None, None


_fwd.register_autograd(_differentiate, setup_context=_save)


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    loss, _, _ = _fwd(logits, targets.contiguous(), mask.contiguous())
    return loss, mask.sum()
