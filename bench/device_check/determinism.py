"""Every kernel again and again: equal inputs must give equal bits, outputs and gradients alike."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.device_check.calls import REAL, TOY, Call, Listed, listed
from bench.device_check.rule import same_bits
from bench.device_check.twins import SHORT
from fastbrain.kernels import fused


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    device = torch.device("cpu" if dry else "cuda")
    # an interpreter has no race to lose
    times = 2 if dry else 20
    calls = listed(TOY if dry else REAL)
    if dry:
        # one of each operation
        calls = list(
            {call.name.split(",")[0].split()[0]: call for call in reversed(calls)}.values()
        )
    for call in calls:
        for dtype in call.dtypes[-1:] if dry else call.dtypes:
            name = f"{call.name}, {SHORT[dtype]}"
            yield name, partial(repeated, call, dtype, device, times)


def repeated(call: Listed, dtype: torch.dtype, device: torch.device, times: int) -> dict[str, Any]:
    """Runs a call so many times, forward and backward, and compares each with the first."""
    torch.manual_seed(0)
    built = call.build(device)
    leaves = {}
    for name, x in built.inputs.items():
        kind = torch.float32 if name in built.fp32 else dtype
        leaves[name] = x.detach().to(kind).requires_grad_(x.requires_grad)
    incoming: list[Tensor] = []
    first = _once(built, leaves, incoming)
    for turn in range(1, times):
        again = _once(built, leaves, incoming)
        for place, (a, b) in enumerate(zip(first, again, strict=True)):
            assert same_bits(a, b), f"result {place} of run {turn + 1} has other bits"
    return {"times": times}


def _once(call: Call, leaves: dict[str, Tensor], incoming: list[Tensor]) -> list[Tensor]:
    """All outputs, then all gradients; the incoming gradients of the first run serve all."""
    outs = call.op(fused)(**leaves)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    wanted = [out for out in outs if out.requires_grad]
    if not wanted:
        return outs
    if not incoming:
        incoming += [torch.randn_like(out) for out in wanted]
    asked = [x for x in leaves.values() if x.requires_grad]
    return [*outs, *torch.autograd.grad(wanted, asked, incoming)]
