"""Cross-entropy of hidden @ weight.T that holds the logits of one chunk of rows at a time.

    loss = sum_n -log softmax(h_n W^T)[target_n];  dh = dlogits W;  dW = dlogits^T h

Forward computes the gradients too, while a chunk's logits are at hand: cuBLAS writes them, a
program per row turns them into their own gradient in place, cuBLAS multiplies that. Backward only
scales. A table of source rows says which hidden row stands where in the chunks; given a bound on
the rows that count, a prefix sum packs them to the front, all of it on the device.

Shapes: N rows, M rows after packing, D width, V vocabulary; hidden (N, D), weight (V, D).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastbrain.kernels import tiles
from fastbrain.kernels.cross_entropy import row_gradient, row_loss
from fastbrain.kernels.derivatives import differentiated_once
from fastbrain.kernels.launch import family_of, launch
from fastbrain.kernels.matmul import product, weight_grad

VECTOR = 8  # elements: 16 bytes of BF16


@triton.jit(do_not_specialize=["N", "M"])
def _pack_kernel(mask_ptr, source_ptr, place_ptr, N, M, BLOCK: tl.constexpr):
    """source[i] = n and place[n] = i for the i-th row n that counts, while i < M."""
    taken = 0
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        on = tl.load(mask_ptr + n, mask=n < N, other=0).to(tl.int32)
        i = taken + tl.cumsum(on, 0) - 1
        kept = (on > 0) & (i < M)
        tl.store(source_ptr + i, n, mask=kept)
        tl.store(place_ptr + n, tl.where(kept, i, -1), mask=n < N)
        taken += tl.sum(on, 0)


@triton.jit
def _gather_kernel(x_ptr, table_ptr, out_ptr, D, stride, BLOCK: tl.constexpr):
    """out[i] = x[table[i]], 0 where the table has -1."""
    i = tl.program_id(0).to(tl.int64)
    n = tl.load(table_ptr + i).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n * stride + d, mask=d < tl.where(n >= 0, D, 0), other=0.0)
    tl.store(out_ptr + i * D + d, x, mask=d < D)


@triton.jit(do_not_specialize=["V"])
def _row_kernel(
    logits_ptr, targets_ptr, source_ptr, losses_ptr, V, stride,
    GRADIENT: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    n = tl.load(source_ptr + i).to(tl.int64)
    on = n >= 0
    target = tl.load(targets_ptr + n, mask=on, other=-1)
    # the factor shows the compiler that rows start and end on vectors
    width = stride * VECTOR
    row_ptr = logits_ptr + i * width
    loss, peak, log_sum = row_loss(row_ptr, on, target, V, width, BLOCK)
    tl.store(losses_ptr + i, loss)
    if GRADIENT:
        row_gradient(row_ptr, row_ptr, on, target, 1.0, peak, log_sum, V, width, BLOCK)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    chunk: int,
    max_rows: int | None,
    shadow: Tensor | None,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, count, and the gradients for a loss gradient of 1, empty where not asked for."""
    operand = weight if shadow is None else shadow
    (N, D), V = hidden.shape, operand.shape[0]
    if max_rows is None:
        numbers = torch.arange(N, dtype=torch.int32, device=hidden.device)
        source, place = numbers.where(mask, -1), None
    else:
        source, place = _pack(mask, min(N, max_rows))
    M = source.shape[0]
    losses = hidden.new_empty(M, dtype=torch.float32)
    # whole vectors in memory, for the row kernel and for cuBLAS, which slows down without
    logits = operand.new_empty(min(M, chunk), triton.cdiv(V, VECTOR) * VECTOR)[:, :V]
    drows = hidden.new_empty((M, D) if for_hidden else 0)
    dweight = operand.new_empty(operand.shape if for_weight else 0, dtype=torch.float32)
    # of no rows one empty chunk remains, which sets the weight's gradient to 0
    for first in range(0, max(M, 1), chunk):
        part = slice(first, min(first + chunk, M))
        # packed, and without the infinities that a row which does not count may hold
        rows = _gather(hidden, source[part])
        dlogits = product(rows, operand.T, out=logits[: rows.shape[0]])
        _loss_to_gradient(dlogits, targets, source[part], losses[part], for_hidden or for_weight)
        if for_hidden:
            product(dlogits, operand, out=drows[part])
        if for_weight:
            weight_grad(dlogits, rows, dweight, fresh=first == 0)
    count = mask.sum()
    loss = losses.sum()
    dhidden = drows
    if place is not None:
        loss = loss.masked_fill(count > M, float("nan"))
        dhidden = _gather(drows, place) if for_hidden else drows
    return loss, count, dhidden, dweight.to(weight.dtype)


def _pack(mask: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """The rows that count, at most M of them and -1 after them; and each row's place among them."""
    N = mask.shape[0]
    source = mask.new_full((M,), -1, dtype=torch.int32)
    place = mask.new_empty(N, dtype=torch.int32)
    launch(_pack_kernel, (1,), mask, source, place, N, M, **tiles.pack_rows(family_of(mask)))
    return source, place


def _gather(x: Tensor, table: Tensor) -> Tensor:
    D = x.shape[1]
    out = x.new_empty(table.shape[0], D)
    tile = tiles.gather_rows(family_of(x))
    grid = (table.shape[0], triton.cdiv(D, tile["BLOCK"]))
    launch(_gather_kernel, grid, x, table, out, D, x.stride(0), **tile)
    return out


def _loss_to_gradient(
    logits: Tensor, targets: Tensor, source: Tensor, losses: Tensor, gradient: bool
) -> None:
    rows, V = logits.shape
    tile = tiles.linear_cross_entropy(family_of(logits))
    launch(
        _row_kernel, (rows,), logits, targets, source, losses, V, logits.stride(0) // VECTOR,
        GRADIENT=gradient, VECTOR=VECTOR, **tile,
    )  # fmt: skip


_fwd = torch.library.custom_op("fastbrain::chunked_head_fwd", _forward, mutates_args=())


@_fwd.register_fake
def _shapes(
    hidden, weight, targets, mask, chunk, max_rows, shadow, for_hidden, for_weight
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if hidden.is_meta and not isinstance(hidden, FakeTensor):
        # the report wants the launches
        return _forward(
            hidden, weight, targets, mask, chunk, max_rows, shadow, for_hidden, for_weight
        )
    # the loop over chunks would tie a traced graph to one number of rows
    return (
        hidden.new_empty((), dtype=torch.float32),
        mask.new_empty((), dtype=torch.int64),
        hidden.new_empty(hidden.shape if for_hidden else 0),
        weight.new_empty(weight.shape if for_weight else 0),
    )


def _save(ctx, inputs, output):
    loss, count, dhidden, dweight = output
    ctx.mark_non_differentiable(count, dhidden, dweight)
    # gradients that nobody sends, as large as the weight, would else be filled with zeros
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(loss, dhidden, dweight)
    ctx.wanted = inputs[-2:]
    ctx.spent = False


@differentiated_once
def _differentiate(ctx, dloss, _dcount, _ddhidden, _ddweight):
    if ctx.spent:
        raise RuntimeError(
            "linear_cross_entropy scales its gradients in place, so backward runs only once; "
            "call the loss again"
        )
    ctx.spent = True
    loss, *unscaled = ctx.saved_tensors
    # rows left out of a packed call have no gradient to show that the sum is NaN
    scale = loss.where(loss.isnan(), dloss)
    gradients = [
        _scaled(g, scale) if wanted else None
        for g, wanted in zip(unscaled, ctx.wanted, strict=True)
    ]
    return *gradients, None, None, None, None, None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    # a tracer passes stand-ins for tensors, and decides itself which memory to use again
    traced = type(gradient) is not Tensor
    return gradient * scale if traced else gradient.mul_(scale)


_fwd.register_autograd(_differentiate, setup_context=_save)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    chunk: int = 2048,
    max_rows: int | None = None,
    shadow: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    loss, count, _, _ = _fwd(
        hidden, weight, targets.contiguous(), mask.contiguous(), chunk, max_rows, shadow, *wanted
    )
    return loss, count
