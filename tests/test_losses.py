"""Sums and means of losses where a batch predicts nothing, or is mostly padding."""

import pytest
import torch
from models import SHAPES, model, ragged, random_ids

from fastbrain import TokenBatch
from fastbrain.losses import batch_losses, summed_losses


def silent() -> TokenBatch:
    """A row of one document none of whose tokens is to be predicted."""
    ids, nothing = random_ids(1, 9), torch.zeros(1, 9, dtype=torch.bool)
    return TokenBatch.packed(ids, nothing.int(), nothing, torch.tensor([9]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_that_predicts_nothing_has_no_loss_and_teaches_nothing(shape):
    lm = model(SHAPES[shape])
    losses = batch_losses(lm.module, silent(), torch.device("cpu"))
    losses.lm_loss.backward()
    found = losses.detach()
    assert [float(found.lm_loss), float(found.lm_loss_sum), int(found.predicted)] == [0, 0, 0]
    assert float(lm.grad_norm()) == 0


def test_a_batch_that_predicts_nothing_changes_no_sum():
    lm = model(SHAPES["dense"])
    alone = summed_losses(lm.evaluate, [ragged([7, 9])])
    both = summed_losses(lm.evaluate, [silent(), ragged([7, 9])])
    assert float(both.lm_loss) == float(alone.lm_loss)
    assert int(both.predicted) == int(alone.predicted) == 14


def test_a_batch_counts_in_the_routing_loss_by_the_tokens_that_it_routes():
    lm = model(SHAPES["moe"])
    # as many rows and columns, and three times as many tokens
    batches = [ragged([12, 2]), ragged([12, 12])]
    valid = [batch.valid_tokens() for batch in batches]
    assert valid == [14, 24]
    parts = [float(lm.evaluate(batch).auxiliary_loss) for batch in batches]
    expected = sum(n * part for n, part in zip(valid, parts, strict=True)) / sum(valid)
    assert abs(parts[0] - parts[1]) > 1e-4 * expected
    found = summed_losses(lm.evaluate, batches)
    assert float(found.auxiliary_loss) == pytest.approx(expected, rel=1e-6)


def test_no_batches_have_no_losses():
    assert summed_losses(model(SHAPES["dense"]).evaluate, []) is None
