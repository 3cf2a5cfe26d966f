"""How a benchmark of an operation is listed and measured: one way for all of them.

On a CPU an operation runs at a toy size, which shows that it works and what Python costs; figures
worth quoting are a card's, at the chapter's sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compiling import interpreted
from bench.operations.case import CHAPTER, TOY, Build
from fastbrain.errors import Cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED_MISSING = "the kernels need a CUDA device"


def rows(build: Build) -> list[Any]:
    """(case, contender) by name, the peers that are missing here included."""
    found = []
    for case in build(TOY, torch.device("cpu")):
        found += [row(case.name, contender) for contender in [*case.contenders, *case.absent]]
    return found


def row(case: str, contender: str, *values: Any) -> Any:
    """A parameter of a benchmark, whose id ends in its contender."""
    assert "-" not in contender
    return pytest.param(*(values or (case, contender)), id=f"{case}-{contender}")


def measure(benchmark: BenchmarkFixture, build: Build, name: str, contender: str) -> None:
    """Times one contender of one case."""
    if contender == "fused" and DEVICE.type == "cpu" and not interpreted():
        pytest.skip(FUSED_MISSING)
    sizes = CHAPTER if DEVICE.type == "cuda" else TOY
    torch.manual_seed(0)
    with where_there_is_room():
        case = next(case for case in build(sizes, DEVICE) if case.name == name)
        if contender in case.absent:
            pytest.skip(case.absent[contender])
        benchmark.extra_info.update(bytes=case.bytes, flops=case.flops)
        timed(benchmark, case.contenders[contender])


@contextmanager
def where_there_is_room() -> Iterator[None]:
    """Skips a benchmark that is too large for this card, whoever runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, Cuda) as error:
        pytest.skip(f"out of memory on this card ({str(error).splitlines()[0]})")


def timed(benchmark: BenchmarkFixture, run: Callable[[], Any]) -> Any:
    """Times a call, on a card by events too, and notes its peak memory there; what it returned.

    The peak is what the call holds at most on top of its inputs, in bytes.
    """
    if not benchmark.enabled:
        return benchmark(run)
    # the first call compiles
    run()
    if DEVICE.type != "cuda":
        return benchmark(run)
    import triton

    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    benchmark.extra_info["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    benchmark.extra_info["event_ms"] = triton.testing.do_bench(
        run, warmup=25, rep=200, return_mode="median"
    )

    def to_the_end() -> Any:
        result = run()
        torch.cuda.synchronize()
        return result

    return benchmark(to_the_end)
