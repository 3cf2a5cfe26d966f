"""Ragged rows that ranks share have the gradient of one big batch, however they are cut."""

import pytest
from ranks import needs_fork, results

pytestmark = needs_fork

SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_gradient_of_ragged_rows_is_that_of_the_whole(parallel):
    for found in results("model_jobs:ragged", parallel, "moe", 16, SIZES):
        assert len(found) == len(SIZES)
        assert max(found) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", ["dense", "moe"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_length_may_be_on_any_rank(parallel, shape, ranks):
    for found in results("model_jobs:ragged", parallel, shape, 64, SIZES, ranks=ranks):
        assert max(found) < 1e-6
