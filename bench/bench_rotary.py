"""Rotary position embedding."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.operations import OPERATIONS
from bench.timing import measure, rows


@pytest.mark.parametrize(("case", "contender"), rows(OPERATIONS["rotary"]))
def bench_rotary(benchmark: BenchmarkFixture, case: str, contender: str) -> None:
    measure(benchmark, OPERATIONS["rotary"], case, contender)
