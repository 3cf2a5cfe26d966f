"""What share of the home card's peak the attention and expert kernels reach, at many shapes.

These kernels are limited by instructions, not by bytes, so the planner needs the simulated time of
their machine code. It has no compiler: it reads the file that
`python -m fastbrain.kernels.report --simulated FILE` writes, which is the output of `shares`.

A share is the time that the operations would take at the card's peak over the simulated time.
Attention's operations are those of the causal half: 2 B H S^2 K forward and 5 B H S^2 K backward.
A product's are those of whole tiles, so that the reader pads rows and columns itself.
"""

from concurrent.futures import Executor
from typing import Any, NamedTuple

import torch

from fastbrain.kernels import cycles, facts, fused, gates
from fastbrain.kernels.closed_forms import name_of, work_of
from fastbrain.kernels.launch import HOME, Launch, recorded
from fastbrain.kernels.machine_code import compiled
from fastbrain.kernels.production import CHAPTER, expert_ffn_of
from fastbrain.kernels.tiles import HEAD_WIDTHS

TOKENS = 8192
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, GROUPS = 12, 4
# width of the model and of an expert: the chapter's proportion at several depths
EXPERTS = ((128, 64), (256, 128), (512, 256), (1024, 512), (2048, 1024))
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Task(NamedTuple):
    """The launches of one differentiated operation, of which a worker simulates all.

    Attributes:
        dtype: of the activations, "bf16" or "fp32".
        head_dim: width of attention's heads, or None for experts.
        size: tokens of a sequence, or the place in `EXPERTS`.
    """

    dtype: str
    head_dim: int | None
    size: int


class Row(NamedTuple):
    """What has a share for every size.

    Attributes:
        name: "forward" or "backward" of attention, or the kernel of an expert product.
        dtype: of the activations.
        head_dim: of attention, where the size is the tokens of a sequence.
        tile: rows and columns of an expert product, where the size is the depth of the product,
            or the number of tiles for the gradient of a weight.
    """

    name: str
    dtype: str
    head_dim: int = 0
    tile: tuple[int, int] | tuple[()] = ()


def tasks() -> list[Task]:
    """Everything there is to simulate."""
    found = [
        Task(dtype, width, length)
        for dtype in _DTYPES
        for width in HEAD_WIDTHS
        for length in LENGTHS
    ]
    return found + [Task(dtype, None, n) for dtype in _DTYPES for n in range(len(EXPERTS))]


def shares(pool: Executor) -> dict[str, Any]:
    """The file's content: shares by kernel or operation, dtype and size."""
    attention: list[dict[str, Any]] = []
    products: list[dict[str, Any]] = []
    for row, found in _merged(pool).items():
        sizes, values = zip(*sorted(found.items()), strict=True)
        table = {**row._asdict(), "size": list(sizes), "share": [round(v, 4) for v in values]}
        (products if row.tile else attention).append(table)
    return {
        "card": {
            "sms": cycles.SMS,
            "clock_hz": cycles.CLOCK_HZ,
            "bf16_flops": cycles.TENSOR_FLOPS,
            "fp32_flops": cycles.TENSOR_FLOPS / 2,
        },
        "attention": attention,
        "products": products,
    }


def _merged(pool: Executor) -> dict[Row, dict[int, float]]:
    merged: dict[Row, dict[int, float]] = {}
    for found in pool.map(simulate, tasks()):
        for (row, size), share in found.items():
            merged.setdefault(row, {})[size] = share
    return merged


def simulate(task: Task) -> dict[tuple[Row, int], float]:
    """Compiles and times one task's launches: the share of each row at its size."""
    return _experts(task) if task.head_dim is None else _attention(task, task.head_dim)


def _attention(task: Task, K: int) -> dict[tuple[Row, int], float]:
    S, dtype = task.size, _DTYPES[task.dtype]
    q, k, v = (
        torch.empty(TOKENS // S, S, n, K, dtype=dtype, device="meta", requires_grad=True)
        for n in (HEADS, GROUPS, GROUPS)
    )
    with recorded(HOME) as launches:
        fused.causal_attention(q, k, v).sum().backward()
    unit = HEADS * TOKENS * S * K
    spent = {"forward": 0.0, "backward": 0.0}
    for launch in launches:
        spent["forward" if name_of(launch) == "attention.fwd" else "backward"] += _ms(launch)
    flops = {"forward": 2 * unit, "backward": 5 * unit}
    return {
        (Row(name, task.dtype, K), S): _share(flops[name], ms, task.dtype)
        for name, ms in spent.items()
    }


def _experts(task: Task) -> dict[tuple[Row, int], float]:
    D, F = EXPERTS[task.size]
    with recorded(HOME) as launches:
        model = CHAPTER._replace(D=D, moe_d_ff=F)
        expert_ffn_of(model, _DTYPES[task.dtype]).sum().backward()
    found: dict[tuple[Row, int], float] = {}
    for launch in launches:
        kernel, work = name_of(launch), work_of(launch)
        if kernel not in gates.EXPERT_PRODUCTS:
            continue
        rows, columns, step = work.products[0]
        # a sum over rows has few, long CTAs: what counts there is how many
        along_rows = kernel == "grouped_gemm.weights"
        size = len(work.ctas) if along_rows else int(work.ctas[0][0] * step)
        row = Row(kernel, task.dtype, tile=(rows, columns))
        if kernel == "grouped_gemm.rows" and any(each == row for each, _ in found):
            # the input's gradient, whose depth is the forward one of the next size
            continue
        found[row, size] = _share(work.flops, _ms(launch), task.dtype)
    return found


def _ms(launch: Launch) -> float:
    return gates.predicted(facts.read(compiled(launch, HOME), HOME), work_of(launch)).simulated


def _share(flops: float, ms: float, dtype: str) -> float:
    peak = cycles.TENSOR_FLOPS if dtype == "bf16" else cycles.TENSOR_FLOPS / 2
    return flops / peak / (ms / 1e3)
