"""The activation of the feed-forward."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.operations import OPERATIONS
from bench.timing import measure, rows


@pytest.mark.parametrize(("case", "contender"), rows(OPERATIONS["swiglu"]))
def bench_swiglu(benchmark: BenchmarkFixture, case: str, contender: str) -> None:
    measure(benchmark, OPERATIONS["swiglu"], case, contender)
