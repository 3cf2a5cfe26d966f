"""One Adam update of all parameters."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.operations import OPERATIONS
from bench.timing import measure, rows


@pytest.mark.parametrize(("case", "contender"), rows(OPERATIONS["adam"]))
def bench_adam(benchmark: BenchmarkFixture, case: str, contender: str) -> None:
    measure(benchmark, OPERATIONS["adam"], case, contender)
