"""Benchmarks are run once anywhere and timed only where the time means something.

Triton's interpreter runs a kernel thousands of times slower than a GPU, so under it a benchmark
may only show that it still runs.
"""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if interpreted and not config.getoption("benchmark_disable", default=True):
        raise pytest.UsageError(
            "TRITON_INTERPRET is set, and timings of interpreted kernels mean nothing; unset it "
            "to time, or add --benchmark-disable to run every benchmark once"
        )
