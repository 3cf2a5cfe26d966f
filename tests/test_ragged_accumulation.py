"""A step cut into micro-batches has the gradient of one big batch, however long its sequences."""

from dataclasses import replace

import pytest
import torch
from models import SHAPES, model, random_ids

from fastbrain import TokenBatch, TransformerLm

# every length that a sequence of at most 64 tokens can have, the neighbors far apart
LENGTHS = [2 + 37 * i % 63 for i in range(63)] + [64]


def sequences(rows: int) -> list[torch.Tensor]:
    return [random_ids(n, seed=100 + i) for i, n in enumerate(LENGTHS[:rows])]


def accumulated(lm: TransformerLm, rows: list[torch.Tensor], micro: int) -> torch.Tensor:
    """The gradient of all rows, `micro` at a time, in one vector of float64."""
    batches = [TokenBatch(rows[i : i + micro]) for i in range(0, len(rows), micro)]
    predicted = sum(each.predicted() for each in batches)
    lm.zero_grad()
    for each in batches:
        lm.accumulate_step(each, weight=each.predicted() / predicted)
    return torch.cat([p.grad.flatten().double() for p in lm.module.parameters()])


@pytest.fixture(params=SHAPES)
def lm(request) -> TransformerLm:
    # auxiliary losses are means of means: they alone depend on the split
    silent = {"aux_loss_weight": 0.0, "router_z_loss_weight": 0.0, "max_seq_len": 64}
    return model(replace(SHAPES[request.param], **silent))


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_any_split_of_ragged_rows_has_the_gradient_of_the_whole(lm, micro):
    rows = sequences(8)
    whole = accumulated(lm, rows, 8)
    assert float(whole.norm()) > 0.1
    assert relative(accumulated(lm, rows, micro), whole) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_every_length_may_meet_every_other_in_a_micro_batch(lm, micro):
    assert sorted(LENGTHS) == [*range(2, 65), 64]
    rows = sequences(64)
    whole = accumulated(lm, rows, 64)
    for turn in (0, 1, 5):
        turned = rows[turn:] + rows[:turn]
        assert relative(accumulated(lm, turned, micro), whole) < 1e-6


def test_a_mean_of_means_would_be_seen(lm):
    rows = sequences(8)
    whole = accumulated(lm, rows, 8)
    lm.zero_grad()
    for row in rows:
        lm.accumulate_step(TokenBatch([row]), weight=1 / 8)
    mean = torch.cat([p.grad.flatten().double() for p in lm.module.parameters()])
    assert relative(mean, whole) > 1e-2


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())
