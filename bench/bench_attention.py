"""Causal attention with grouped query heads."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.operations import OPERATIONS
from bench.timing import measure, rows


@pytest.mark.parametrize(("case", "contender"), rows(OPERATIONS["attention"]))
def bench_attention(benchmark: BenchmarkFixture, case: str, contender: str) -> None:
    measure(benchmark, OPERATIONS["attention"], case, contender)
