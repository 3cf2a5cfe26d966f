"""Milliseconds of every operation and of what a user would pick instead, taking turns."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from bench import operations
from bench.device_check.journal import Skipped

ROUNDS = 3


def cases(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    device = torch.device("cpu" if dry else "cuda")
    for case in operations.cases(operations.TOY if dry else _sizes(), device):
        yield case.name, partial(_timed, case, dry)


def _sizes() -> operations.Sizes:
    """The chapter's, with as many parameters for the update as this card has room for."""
    room = torch.cuda.mem_get_info()[0]
    # five tensors of FP32 while the inputs are made, and shadows
    most = int(0.9 * room / 22)
    chapter = operations.CHAPTER
    return replace(chapter, parameters=min(chapter.parameters, most))


def _timed(case: operations.Case, dry: bool) -> dict[str, Any]:
    rounds: dict[str, list[float]] = {}
    errors = dict(case.absent)
    runs = dict(case.contenders)
    # each once before any is timed: that compiles it
    for name, run in case.contenders.items():
        try:
            run()
        except Exception as error:
            if name == "fused":
                raise
            errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
            if "CUDA error" in str(error):
                raise Skipped(f"{name} lost the GPU ({errors[name]})") from error
            del runs[name]
    if not dry:
        for turn in range(ROUNDS):
            for name in list(runs) if turn % 2 == 0 else reversed(runs):
                rounds.setdefault(name, []).append(_milliseconds(runs[name]))
    row: dict[str, Any] = {
        "ms": {name: statistics.median(rounds[name]) if rounds else None for name in runs},
        "spread": {name: max(each) / min(each) for name, each in rounds.items()},
        "errors": errors,
        "bytes": case.bytes,
        "flops": case.flops,
    }
    ours = row["ms"]["fused"]
    peers = {n: t for n, t in row["ms"].items() if n not in operations.OURS}
    if rounds and peers:
        row["fastest_peer"] = min(peers, key=lambda name: peers[name])
        row["ratio"] = peers[row["fastest_peer"]] / ours
    return row | {"line": _line(row)}


def _milliseconds(run: Callable[[], Any]) -> float:
    """The median over a tenth of a second or so, with a cold L2 cache each time."""
    found: float = triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")
    return found


def _line(row: dict[str, Any]) -> str:
    words = [name if t is None else f"{name} {t:.3f} ms" for name, t in row["ms"].items()]
    ours = row["ms"]["fused"]
    if ours and row["flops"]:
        words.append(f"{row['flops'] / ours / 1e9:.0f} TFLOPS")
    if ours and row["bytes"]:
        words.append(f"{row['bytes'] / ours / 1e6:.0f} GB/s")
    if "ratio" in row:
        words.append(f"{row['ratio']:.2f} x as fast as {row['fastest_peer']}")
    return ", ".join(words) + (f"; without {', '.join(row['errors'])}" if row["errors"] else "")
