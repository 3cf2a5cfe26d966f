"""The head and its loss, without ever holding the logits."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.operations import OPERATIONS
from bench.timing import measure, rows


@pytest.mark.parametrize(("case", "contender"), rows(OPERATIONS["linear_cross_entropy"]))
def bench_linear_cross_entropy(benchmark: BenchmarkFixture, case: str, contender: str) -> None:
    measure(benchmark, OPERATIONS["linear_cross_entropy"], case, contender)
