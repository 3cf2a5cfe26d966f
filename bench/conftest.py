"""Benchmarks are run once anywhere and timed only where the time means something.

Triton's interpreter runs a kernel thousands of times slower than a GPU, so under it a benchmark
may only show that it still runs. That is what --benchmark-disable asks for, and how the kernels
then run where there is no GPU.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.compiling import interpreted


def pytest_configure(config: pytest.Config) -> None:
    disabled = config.getoption("benchmark_disable", default=True)
    if disabled and not torch.cuda.is_available():
        # Triton reads it when a kernel is decorated, so before a benchmark imports one
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if interpreted() and not disabled:
        raise pytest.UsageError(
            "TRITON_INTERPRET is set, and timings of interpreted kernels mean nothing; unset it "
            "to time, or add --benchmark-disable to run every benchmark once"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not interpreted() and Path(__file__).parent in item.path.parents:
            # what a peer has to say on somebody's machine is no failure of ours
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    from bench.machine import machine

    machine_info["fastbrain"] = machine()


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
