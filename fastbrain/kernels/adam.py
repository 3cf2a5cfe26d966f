"""Adam for all parameters in one launch, and the norm of all gradients.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p -= lr wd p
    p -= rate m / (sqrt(v) root + eps);  rate = lr / (1 - b1^t);  root = 1 / sqrt(1 - b2^t)

A table on the device holds a row of addresses and sizes per tensor, and a second one the owner of
every block of elements, so that a program finds its tensor by its index alone. A launch of one
program goes first: it counts the step and leaves rate and root, taken from powers in FP64, on the
device, where a replayed graph advances them. The norm is a sum of squares per block in FP32, which
one program then adds up in order in FP64.
"""

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastbrain.kernels import tiles
from fastbrain.kernels.contracts import AdamScalars
from fastbrain.kernels.dot import narrow
from fastbrain.kernels.launch import family_of, launch

# a row: addresses of p, g, m, v and shadow; elements; first block; flags; decay rate in FP32
_COLUMNS = tl.constexpr(9)
_NARROW = tl.constexpr(1)  # the gradient is BF16
_ALIGNED = tl.constexpr(2)  # every address is a multiple of 16 bytes

_Row = tuple[int, ...]


@triton.jit
def _power(base, exponent):
    power = tl.full((), 1.0, tl.float64)
    while exponent > 0:
        power = tl.where(exponent % 2 == 1, power * base, power)
        base = base * base
        exponent = exponent // 2
    return power


@triton.jit
def _count_kernel(lr_ptr, step_ptr, skip_ptr, rates_ptr, BETA1: tl.constexpr, BETA2: tl.constexpr):
    step = tl.load(step_ptr)
    t = step + 1
    # 1 - 0.999 is off by 1.3e-5 in FP32
    rest1 = 1.0 - _power(tl.full((), BETA1, tl.float64), t)
    rest2 = 1.0 - _power(tl.full((), BETA2, tl.float64), t)
    tl.store(rates_ptr, (tl.load(lr_ptr).to(tl.float64) / rest1).to(tl.float32))
    tl.store(rates_ptr + 1, (1.0 / tl.sqrt(rest2)).to(tl.float32))
    tl.store(step_ptr, tl.where(tl.load(skip_ptr) == 0, t, step))


@triton.jit
def _at(address, start, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    ptr = address.to(tl.pointer_type(DTYPE))
    if WHOLE:
        # an address from a table says nothing of its alignment
        ptr = tl.multiple_of(ptr, 16)
    return ptr + start


@triton.jit
def _load(ptr, i, left, WHOLE: tl.constexpr):
    # a mask would hide the alignment
    x = tl.load(ptr + i) if WHOLE else tl.load(ptr + i, mask=i < left, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store(ptr, i, left, x, WHOLE: tl.constexpr):
    tl.store(ptr + i, narrow(x, ptr.dtype.element_ty), mask=None if WHOLE else i < left)


@triton.jit
def _update(
    row_ptr, start, left, lr, factor, rate, root, beta1, rest1, beta2, rest2, eps,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    p_ptr = _at(tl.load(row_ptr), start, tl.float32, WHOLE)
    m_ptr = _at(tl.load(row_ptr + 2), start, tl.float32, WHOLE)
    v_ptr = _at(tl.load(row_ptr + 3), start, tl.float32, WHOLE)
    p = _load(p_ptr, i, left, WHOLE)
    m = _load(m_ptr, i, left, WHOLE)
    v = _load(v_ptr, i, left, WHOLE)
    grad = tl.load(row_ptr + 1)
    if grad == 0:
        g = tl.zeros((BLOCK,), tl.float32)
    elif tl.load(row_ptr + 7) & _NARROW:
        g = _load(_at(grad, start, tl.bfloat16, WHOLE), i, left, WHOLE)
    else:
        g = _load(_at(grad, start, tl.float32, WHOLE), i, left, WHOLE)
    g = g * factor
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    decay = tl.load(row_ptr + 8).to(tl.int32).to(tl.float32, bitcast=True)
    p = p - lr * decay * p
    # rounded as PyTorch's: Triton's plain division and root are approximate
    p = p - rate * tl.div_rn(m, tl.sqrt_rn(v) * root + eps)
    _store(p_ptr, i, left, p, WHOLE)
    _store(m_ptr, i, left, m, WHOLE)
    _store(v_ptr, i, left, v, WHOLE)
    shadow = tl.load(row_ptr + 4)
    if shadow != 0:
        _store(_at(shadow, start, tl.bfloat16, WHOLE), i, left, p, WHOLE)


@triton.jit
def _step_kernel(
    owner_ptr, table_ptr, lr_ptr, grad_scale_ptr, clip_ptr, skip_ptr, rates_ptr,
    beta1, rest1, beta2, rest2, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) == 0:
        block = tl.program_id(0)
        row_ptr = table_ptr + tl.load(owner_ptr + block) * _COLUMNS
        # a tensor may have more than 2**31 elements
        start = (block - tl.load(row_ptr + 6)) * BLOCK
        left = tl.load(row_ptr + 5) - start
        lr = tl.load(lr_ptr).to(tl.float32)
        factor = (tl.load(grad_scale_ptr) * tl.load(clip_ptr)).to(tl.float32)
        rate = tl.load(rates_ptr)
        root = tl.load(rates_ptr + 1)
        if (left >= BLOCK) & ((tl.load(row_ptr + 7) & _ALIGNED) != 0):
            _update(
                row_ptr, start, left, lr, factor, rate, root, beta1, rest1, beta2, rest2, eps,
                BLOCK, True,
            )  # fmt: skip
        else:
            # in parts, of a shape of their own, lest the compiler lay both cases out alike
            for part in range(0, BLOCK, BLOCK // 4):
                _update(
                    row_ptr, start + part, left - part, lr, factor, rate, root, beta1, rest1,
                    beta2, rest2, eps, BLOCK // 4, False,
                )  # fmt: skip


@triton.jit
def _squares(row_ptr, start, left, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    ptr = _at(tl.load(row_ptr + 1), start, DTYPE, WHOLE)
    x = _load(ptr, tl.arange(0, BLOCK), left, WHOLE)
    return tl.sum(x * x, axis=0)


@triton.jit
def _squares_kernel(owner_ptr, table_ptr, partial_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row_ptr = table_ptr + tl.load(owner_ptr + block) * _COLUMNS
    start = (block - tl.load(row_ptr + 6)) * BLOCK
    left = tl.load(row_ptr + 5) - start
    flags = tl.load(row_ptr + 7)
    whole = (left >= BLOCK) & ((flags & _ALIGNED) != 0)
    if flags & _NARROW:
        if whole:
            squares = _squares(row_ptr, start, left, tl.bfloat16, BLOCK, True)
        else:
            squares = _squares(row_ptr, start, left, tl.bfloat16, BLOCK, False)
    elif whole:
        squares = _squares(row_ptr, start, left, tl.float32, BLOCK, True)
    else:
        squares = _squares(row_ptr, start, left, tl.float32, BLOCK, False)
    tl.store(partial_ptr + block, squares)


@triton.jit(do_not_specialize=["blocks"])
def _root_kernel(partial_ptr, norm_ptr, blocks, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + i, mask=i < blocks, other=0.0).to(tl.float64)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total, axis=0)).to(tl.float32))


_Tables = tuple[Tensor, Tensor]

# gradients come back to the same few addresses, so that a run needs few tables; an optimizer with
# many groups needs one for each, but small ones
_KEPT_BYTES = 2**27
_tables: dict[Any, _Tables] = {}
# a graph reads its tables at each replay
_captured: list[_Tables] = []


def _find(rows: tuple[_Row, ...], block: int, like: Tensor) -> _Tables:
    """The owner of every block and the rows, on like's device, where they stay for later calls."""
    if like.is_meta or isinstance(like, FakeTensor):
        return like.new_empty(0, dtype=torch.int64), like.new_empty(0, dtype=torch.int64)
    key = rows, block, like.device
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    found = _tables.pop(key, None)
    if found is None:
        if capturing:
            raise ValueError("run adam_step or grad_norm on the same tensors before capturing it")
        found = _build(rows, block, like.device)
        kept = sum(x.nbytes for tables in _tables.values() for x in tables)
        while _tables and kept + sum(x.nbytes for x in found) > _KEPT_BYTES:
            kept -= sum(x.nbytes for x in _tables.pop(next(iter(_tables))))
    _tables[key] = found
    if capturing:
        _captured.append(found)
    return found


def _build(rows: tuple[_Row, ...], block: int, device: torch.device) -> _Tables:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, _COLUMNS.value)
    counts = (table[:, 5] + (block - 1)) // block
    table[:, 6] = counts.cumsum(0) - counts
    owner = torch.arange(len(rows)).repeat_interleave(counts)
    if device.type == "cuda":
        # from pinned memory, so that the host need not wait for the copy
        owner, table = owner.pin_memory(), table.pin_memory()
    return owner.to(device, non_blocking=True), table.to(device, non_blocking=True)


def _row(p: Tensor, g: Tensor, m: Tensor, v: Tensor, shadow: Tensor, decay: float) -> _Row:
    flags = _NARROW.value * (g.dtype == torch.bfloat16)
    addresses = [_address(x) for x in (p, g, m, v, shadow)]
    if not any(address % 16 for address in addresses):
        flags += _ALIGNED.value
    (bits,) = struct.unpack("<i", struct.pack("<f", decay))
    return (*addresses, p.numel(), 0, flags, bits)


def _address(x: Tensor) -> int:
    # an absent tensor is at no address, and so is one without data
    absent = not x.numel() or x.is_meta or isinstance(x, FakeTensor)
    return 0 if absent else x.data_ptr()


def _step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    shadows: Sequence[Tensor],
    lr: Tensor,
    grad_scale: Tensor,
    clip: Tensor,
    step: Tensor,
    skip: Tensor,
    betas: Sequence[float],
    eps: float,
    weight_decays: Sequence[float],
) -> None:
    lists = (params, grads, exp_avgs, exp_avg_sqs, shadows)
    rows = tuple(
        _row(p, g, m, v, shadow, decay)
        for p, g, m, v, shadow, decay in zip(*lists, weight_decays, strict=True)
    )
    tile = tiles.adam_step(family_of(step))
    owner, table = _find(rows, tile["BLOCK"], step)
    rates = torch.empty(2, dtype=torch.float32, device=step.device)
    beta1, beta2 = betas
    launch(
        _count_kernel, (1,), lr, step, skip, rates, BETA1=beta1, BETA2=beta2,
        num_warps=1, num_stages=1,
    )  # fmt: skip
    launch(
        _step_kernel, (_blocks(rows, tile["BLOCK"]),), owner, table, lr, grad_scale, clip, skip,
        rates, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, **tile,
    )  # fmt: skip


def _norm(grads: Sequence[Tensor]) -> Tensor:
    none = grads[0].new_empty(0)
    rows = tuple(_row(g, g, none, none, none, 0.0) for g in grads)
    family = family_of(grads[0])
    tile = tiles.grad_norm(family)
    owner, table = _find(rows, tile["BLOCK"], grads[0])
    blocks = _blocks(rows, tile["BLOCK"])
    partial = torch.empty(blocks, dtype=torch.float32, device=grads[0].device)
    launch(_squares_kernel, (blocks,), owner, table, partial, **tile)
    norm = torch.empty((), dtype=torch.float32, device=grads[0].device)
    launch(_root_kernel, (1,), partial, norm, blocks, **tiles.grad_norm_sum(family))
    return norm


def _blocks(rows: tuple[_Row, ...], block: int) -> int:
    return sum(triton.cdiv(row[5], block) for row in rows)


_step_op = torch.library.custom_op(
    "fastbrain::adam_step",
    _step,
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "shadows", "step"),
)
_norm_op = torch.library.custom_op("fastbrain::adam_norm", _norm, mutates_args=())
_step_op.register_fake(_step)
_norm_op.register_fake(_norm)


def _check(name: str, tensors: Sequence[Tensor], dtypes: tuple[torch.dtype, ...], like: Tensor):
    for i, x in enumerate(tensors):
        # the kernel goes by addresses alone
        if x.numel() and (x.dtype not in dtypes or x.device != like.device):
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(
                f"{name}[{i}] must be {allowed} on {like.device}, got {x.dtype} on {x.device}"
            )


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    shadows: Sequence[Tensor],
    scalars: AdamScalars,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decays: Sequence[float],
) -> None:
    fp32, either = (torch.float32,), (torch.float32, torch.bfloat16)
    _check("params", params, fp32, scalars.step)
    _check("grads", grads, either, scalars.step)
    _check("exp_avgs", exp_avgs, fp32, scalars.step)
    _check("exp_avg_sqs", exp_avg_sqs, fp32, scalars.step)
    _check("shadows", shadows, (torch.bfloat16,), scalars.step)
    with torch.no_grad():
        _step_op(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            list(shadows),
            *scalars,
            list(betas),
            eps,
            list(weight_decays),
        )


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    _check("grads", grads, (torch.float32, torch.bfloat16), grads[0])
    with torch.no_grad():
        return _norm_op([grad.contiguous() for grad in grads])
