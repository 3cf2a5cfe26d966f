"""Every kernel against its definition in FP64, outputs and gradients, by the tests' own rule."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.device_check import far
from bench.device_check.calls import REAL, TOY, Listed, listed
from bench.device_check.rule import numerics, repeatable
from fastbrain.kernels import fused, reference

SHORT = {torch.float32: "FP32", torch.bfloat16: "BF16"}


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    # without a workspace of its own cuBLAS sums in any order; it reads this at its first product
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    repeatable()
    device = torch.device("cpu" if dry else "cuda")
    for call in listed(TOY if dry else REAL):
        for dtype in call.dtypes:
            yield f"{call.name}, {SHORT[dtype]}", partial(_compared, call, dtype, device)
    yield from far.cases(dry)


def _compared(call: Listed, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    built = call.build(device)
    numerics.assert_twins(
        built.op(fused), built.op(reference), built.inputs, dtype, fp32=built.fp32
    )
    return {}
