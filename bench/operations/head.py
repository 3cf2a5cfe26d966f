"""The two losses, with and without the product before them."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.compiling import compiled, compiler_missing
from bench.operations.case import Case, Sizes, Ways, leaf
from fastbrain.kernels import fused, reference


def linear_cross_entropy(z: Sizes, device: torch.device) -> Iterator[Case]:
    hidden = leaf(z.N, z.D, device=device)
    weight = leaf(z.V, z.D, device=device, dtype=torch.float32)
    shadow = weight.detach().bfloat16()
    narrow = shadow.clone().requires_grad_()
    targets = torch.randint(z.V, (z.N,), device=device)
    everywhere = torch.ones(z.N, dtype=torch.bool, device=device)
    quarter = torch.rand(z.N, device=device) < 0.25
    rows = int(quarter.sum())

    def loss(twin: Any, mask: Tensor, max_rows: int | None = None) -> Tensor:
        out: Tensor = twin.linear_cross_entropy(
            hidden, weight, targets, mask, max_rows=max_rows, shadow=shadow
        )[0]
        return out

    leaves, theirs = (hidden, weight), (hidden, narrow)
    given = (hidden, narrow, targets)
    ways = Ways()
    ways.add("fused", lambda: loss(fused, everywhere), leaves)
    ways.add("reference", lambda: loss(reference, everywhere), leaves)
    ways.add("unchunked", lambda: _unchunked(*given), theirs)
    whole = compiled(_unchunked)
    ways.add("unchunked compiled", lambda: whole(*given), theirs, compiler_missing(device))
    ways.add("PyTorch chunked", lambda: _chunked(*given), theirs, _chunked_missing())
    ways.add("Liger", _liger(*given), theirs, _liger_missing(device))
    flops = 6 * z.N * z.D * z.V
    traffic = 12.0 * z.N * z.V
    yield ways.both("head and loss forward+backward", traffic, flops)
    ways = Ways()
    ways.add("fused", lambda: loss(fused, quarter, rows), leaves)
    ways.add("reference", lambda: loss(reference, quarter, rows), leaves)
    yield ways.both("head and loss, 25% of rows", traffic / 4, flops / 4)


def masked_cross_entropy(z: Sizes, device: torch.device) -> Iterator[Case]:
    logits = leaf(z.N, z.V, device=device)
    targets = torch.randint(z.V, (z.N,), device=device)
    mask = torch.ones(z.N, dtype=torch.bool, device=device)
    ways = Ways()
    ways.add("fused", lambda: fused.masked_cross_entropy(logits, targets, mask), (logits,))
    ways.add("reference", lambda: reference.masked_cross_entropy(logits, targets, mask), (logits,))
    ways.add("F.cross_entropy", lambda: _cross_entropy(logits, targets), (logits,))
    whole = compiled(_cross_entropy)
    missing = compiler_missing(device)
    ways.add("torch.compile", lambda: whole(logits, targets), (logits,), missing)
    size = z.N * z.V
    yield ways.forward("loss forward", 2.0 * size, 0)
    yield ways.both("loss forward+backward", 6.0 * size, 0)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(hidden @ weight.T, targets)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    out: Tensor = F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)
    return out


def _chunked_missing() -> str | None:
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return "it came with PyTorch 2.13; install a newer one"


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
    def run() -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        out: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)
        return out

    return run


def _liger_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Liger's kernels need a CUDA device"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed; `pip install '.[bench]'` brings it"
    return None
