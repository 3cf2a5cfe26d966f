"""What other tiles would cost on the home card, simulated: the tables of docs/kernels.md.

    python -m bench.tile_candidates [--jobs 2]

Every candidate goes through the compiler and the model of the card that the report uses, in BF16:
attention at the dense model's batch and heads, for several head widths, expert products at the
chapter's shape with balanced experts. Nothing here is measured.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastbrain.kernels import facts, fused, gates, tiles
from fastbrain.kernels.closed_forms import name_of, work_of
from fastbrain.kernels.launch import HOME, recorded
from fastbrain.kernels.machine_code import compiled
from fastbrain.kernels.production import CHAPTER, DENSE

# query rows, key rows, warps, stages; the first is the one that ships
ATTENTION = {
    ("attention.fwd", 64): [
        (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 2),
        (128, 32, 8, 2), (128, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2), (64, 64, 8, 2),
    ],
    ("attention.bwd_dq", 64): [
        (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (32, 32, 4, 2), (32, 64, 4, 2),
        (128, 32, 8, 2), (128, 64, 8, 2),
    ],
    ("attention.bwd_dkv", 64): [
        (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (32, 32, 4, 2), (32, 128, 4, 2),
        (64, 64, 8, 2), (32, 128, 8, 2), (64, 128, 8, 2),
    ],
    ("attention.fwd", 128): [
        (128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 2),
    ],
    ("attention.bwd_dq", 128): [
        (32, 32, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2),
    ],
    ("attention.bwd_dkv", 128): [(64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2)],
    ("attention.fwd", 32): [(64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 4, 2)],
    ("attention.fwd", 16): [(64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 4, 2)],
    ("attention.bwd_dkv", 32): [(32, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 1), (64, 64, 4, 2)],
}  # fmt: skip
_ATTENTION_TILES = {
    "attention.fwd": tiles._ATTENTION_FWD,
    "attention.bwd_dq": tiles._ATTENTION_BWD_DQ,
    "attention.bwd_dkv": tiles._ATTENTION_BWD_DKV,
}
# rows, columns, depth, warps, stages; of weights columns, columns, rows of one product
EXPERTS = {
    "experts.hidden": [
        (64, 64, 32, 4, 3), (64, 64, 32, 4, 2), (64, 32, 32, 4, 3), (64, 64, 64, 4, 2),
        (64, 128, 32, 8, 3), (128, 32, 32, 4, 3), (128, 64, 32, 4, 2), (128, 64, 32, 8, 3),
        (128, 128, 32, 8, 3),
    ],
    "grouped_gemm.rows": [
        (64, 128, 32, 4, 3), (64, 64, 32, 4, 3), (64, 128, 64, 4, 3), (128, 64, 32, 4, 3),
        (128, 128, 32, 4, 3), (128, 128, 32, 4, 2), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3),
    ],
    "experts.hidden_grad": [
        (64, 64, 32, 4, 2), (64, 64, 32, 4, 3), (64, 32, 32, 4, 2), (64, 128, 32, 4, 2),
        (64, 128, 32, 8, 3), (128, 64, 32, 4, 2), (128, 64, 32, 8, 3), (64, 64, 64, 4, 2),
    ],
    "grouped_gemm.weights": [
        (128, 128, 32, 8, 2), (128, 128, 32, 8, 3), (128, 128, 32, 4, 2), (64, 128, 32, 4, 2),
        (64, 128, 32, 4, 3), (128, 64, 32, 4, 2), (64, 64, 32, 4, 2), (64, 64, 64, 4, 2),
    ],
}  # fmt: skip
_EXPERT_TILES: dict[str, dict[tuple[str, int], Any]] = {
    "experts.hidden": tiles._EXPERT_HIDDEN,
    "grouped_gemm.rows": tiles._GROUP_ROWS,
    "experts.hidden_grad": tiles._EXPERT_HIDDEN_GRAD,
    "grouped_gemm.weights": tiles._GROUP_WEIGHTS,
}


class Candidate(NamedTuple):
    """A tile of one kernel; `width` is the head's, 0 for expert products."""

    kernel: str
    width: int
    tile: tuple[int, ...]

    @property
    def row(self) -> str:
        return f"{self.kernel}, width {self.width}" if self.width else self.kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    found: dict[str, list[str]] = {}
    everything = list(candidates())
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(
            parser.parse_args().jobs, get_context("spawn"), _start, (cache,)
        ) as pool,
    ):
        for candidate, text in zip(everything, pool.map(judge, everything), strict=True):
            found.setdefault(candidate.row, []).append(text)
    print("| kernel | ships | lost |\n| --- | --- | --- |")
    for row, (ships, *lost) in found.items():
        print(f"| {row} | {ships} | {'; '.join(lost)} |")


def candidates() -> Iterator[Candidate]:
    for (kernel, width), several in ATTENTION.items():
        yield from (Candidate(kernel, width, tile) for tile in several)
    for kernel, several in EXPERTS.items():
        yield from (Candidate(kernel, 0, tile) for tile in several)


def _start(cache: str) -> None:
    triton.knobs.cache.dir = cache


def judge(candidate: Candidate) -> str:
    """Tile, simulated milliseconds of each launch, and what speaks against it."""
    *blocks, warps, stages = candidate.tile
    text = f"{'x'.join(map(str, blocks))} w{warps} s{stages}"
    times, against = [], set()
    for launch in _launches(candidate):
        try:
            code = facts.read(compiled(launch, HOME), HOME)
        except Exception as error:  # what a compiler refuses has lost
            return f"{text} {type(error).__name__}"
        times.append(f"{gates.predicted(code, work_of(launch)).simulated:.3f}")
        if code.spills:
            against.add("spills")
        if code.ctas < 2:
            against.add("one CTA")
    return f"{text} {' and '.join(times)}" + "".join(f", {x}" for x in sorted(against))


def _launches(candidate: Candidate) -> list[Any]:
    kernel, width, tile = candidate
    if width:
        _ATTENTION_TILES[kernel][HOME][2, width] = tile  # type: ignore[assignment]
    elif kernel == "grouped_gemm.weights":
        _EXPERT_TILES[kernel][HOME, 2] = tile
    else:
        rows, *rest = tile
        tiles._group_rows = lambda family, itemsize: rows  # type: ignore[assignment]
        _EXPERT_TILES[kernel][HOME, 2] = tuple(rest)
    with recorded(HOME) as launches:
        (_attention(width) if width else _experts()).sum().backward()
    # the same kernel at several shapes: forward and backward, or two weights
    return [launch for launch in launches if name_of(launch) == kernel]


def _attention(width: int) -> Tensor:
    m = DENSE
    q, k, v = (_leaf(m.B, m.S, heads, width) for heads in (m.H, m.G, m.G))
    return fused.causal_attention(q, k, v)


def _experts() -> Tensor:
    m = CHAPTER
    N, E, D, F = m.B * m.S, m.E, m.D, m.moe_d_ff
    weights = [_leaf(*shape, dtype=torch.float32) for shape in ((E, 2 * F, D), (E, D, F))]
    gate_up, down = (torch.empty_like(w, dtype=torch.bfloat16) for w in weights)
    ids = torch.empty(N, m.top_k, dtype=torch.int32, device="meta")
    gates_ = _leaf(N, m.top_k, dtype=torch.float32)
    return fused.expert_ffn(_leaf(N, D), *weights, ids, gates_, (gate_up, down))


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


if __name__ == "__main__":
    main()
