"""Matrix products with an FP32 master weight and, under mixed precision, its BF16 shadow.

Autograd casts a gradient to the dtype of its input, so a BF16 weight could never receive an FP32
gradient. These products therefore take the FP32 master, multiply by the shadow, and return the
master's gradient in FP32. The products themselves are PyTorch's own (cuBLAS, oneDNN): there is
nothing in them to fuse, so both twins share this file.

Shapes: N rows, D input width, O output width, E groups.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastbrain.kernels.derivatives import differentiated_once
from fastbrain.kernels.devices import has_fast_bf16


def linear(x: Tensor, weight: Tensor, shadow: Tensor | None = None) -> Tensor:
    if shadow is None:
        return F.linear(x, weight)
    out: Tensor = _ShadowLinear.apply(x, weight, shadow)
    return out


def grouped_linear(
    x: Tensor, weight: Tensor, shadow: Tensor | None, counts: Sequence[int]
) -> Tensor:
    """Rows of x (M, D), sorted by group, times the weight (E, O, D) of their group.

    `counts` has the rows of each group, on the host; rows past their sum come out 0.
    """
    out: Tensor = _GroupedLinear.apply(x, weight, shadow, counts)
    return out


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b of two matrices of one dtype, summed in FP32 and rounded once."""
    if a.dtype == torch.bfloat16 and not has_fast_bf16(a.device.type):
        # the same result as PyTorch's emulation of BF16, and five times as fast
        wide = torch.mm(a.float(), b.float())
        return wide.to(a.dtype) if out is None else out.copy_(wide)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def weight_grad(dout: Tensor, x: Tensor, total: Tensor, fresh: bool = False) -> None:
    """Adds dout.T @ x to `total`, which may be wider than the operands; `fresh` overwrites it."""
    kept = 0 if fresh else 1
    if dout.dtype == total.dtype:
        total.addmm_(dout.T, x, beta=kept)
    elif total.is_cuda and not isinstance(total, FakeTensor):
        # one pass over the total; PyTorch before 2.13 cannot trace this form of the product
        torch.addmm(total, dout.T, x, out_dtype=total.dtype, beta=kept, out=total)
    else:
        added = _wide_product(dout, x, total.dtype)
        if fresh:
            total.copy_(added)
        else:
            total += added


class _ShadowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shadow: Tensor) -> Tensor:
        ctx.save_for_backward(x, shadow)
        ctx.grad_dtype = weight.dtype
        rows = x.reshape(-1, x.shape[-1])
        out = product(rows, shadow.T)
        # not even a view of the same shape: FSDP2 wants a block's output to be a tensor of its own
        return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, shadow = ctx.saved_tensors
        rows = dout.reshape(-1, dout.shape[-1])
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = product(rows, shadow).view_as(x)
        if ctx.needs_input_grad[1]:
            dweight = _wide_product(rows, x.reshape(-1, x.shape[-1]), ctx.grad_dtype)
        return dx, dweight, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shadow: Tensor | None, counts: Sequence[int]
    ) -> Tensor:
        operand = weight if shadow is None else shadow
        ctx.save_for_backward(x, operand)
        ctx.counts, ctx.grad_dtype = counts, weight.dtype
        out = x.new_empty(x.shape[0], weight.shape[1])
        for group, rows in _groups(counts):
            product(x[rows], operand[group].T, out=out[rows])
        out[sum(counts) :] = 0
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, operand = ctx.saved_tensors
        dx = dweight = None
        dout = dout.contiguous()
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            for group, rows in _groups(ctx.counts):
                product(dout[rows], operand[group], out=dx[rows])
            dx[sum(ctx.counts) :] = 0
        if ctx.needs_input_grad[1]:
            dweight = torch.empty_like(operand, dtype=ctx.grad_dtype)
            for group, rows in _groups(ctx.counts):
                if dout.dtype == ctx.grad_dtype:
                    torch.mm(dout[rows].T, x[rows], out=dweight[group])
                else:
                    dweight[group] = _wide_product(dout[rows], x[rows], ctx.grad_dtype)
        return dx, dweight, None, None


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    first = 0
    for group, count in enumerate(counts):
        yield group, slice(first, first + count)
        first += count


def _wide_product(dout: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dout.T @ x of BF16 operands, in `dtype`."""
    if dout.is_cuda:
        return torch.mm(dout.T, x, out_dtype=dtype)
    if has_fast_bf16("cpu"):
        # the CPU has no product with a wider result: this one is summed in FP32, rounded once
        return torch.mm(dout.T, x).to(dtype)
    return torch.mm(dout.to(dtype).T, x.to(dtype))
