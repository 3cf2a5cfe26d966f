"""Scoring at the edges of a file: one token, one window, one more, and batches that do not fit."""

import math

import pytest
import torch
from models import SHAPES, model, random_ids

from fastbrain import InvalidDataset, TokenBatch, TokenFile

WINDOW = 16


@pytest.fixture(params=SHAPES)
def lm(request):
    return model(SHAPES[request.param])


@pytest.fixture
def file_of(tmp_path):
    ids = random_ids(10 * WINDOW).numpy()

    def make(tokens: int) -> TokenFile:
        TokenFile.write(tmp_path / f"{tokens}.bin", ids[:tokens])
        return TokenFile.open(tmp_path / f"{tokens}.bin", 0)

    return make


def test_a_file_of_one_token_has_nothing_to_score(lm, file_of):
    with pytest.raises(InvalidDataset, match=r"1 token.*window of 16"):
        lm.evaluate_file(file_of(1), 8, WINDOW)


@pytest.mark.parametrize("rows", [1, 7, 8])
@pytest.mark.parametrize("more", [0, 1])
def test_a_window_is_scored_and_a_token_more_changes_nothing(lm, file_of, rows, more):
    alone = lm.evaluate(TokenBatch(random_ids(10 * WINDOW)[:WINDOW].reshape(1, -1)))
    losses = lm.evaluate_file(file_of(WINDOW + more), rows, WINDOW)
    assert int(losses.predicted) == WINDOW - 1
    assert math.isclose(float(losses.lm_loss), float(alone.lm_loss), rel_tol=1e-6)


def test_a_short_last_batch_counts_by_its_tokens(lm, file_of):
    whole = lm.evaluate_file(file_of(9 * WINDOW), 9, WINDOW)
    for rows in (1, 7, 8):
        losses = lm.evaluate_file(file_of(9 * WINDOW), rows, WINDOW)
        assert int(losses.predicted) == int(whole.predicted) == 9 * (WINDOW - 1)
        assert math.isclose(float(losses.lm_loss), float(whole.lm_loss), rel_tol=1e-6)


def test_scoring_a_file_leaves_weights_moments_gradients_and_generators_alone(lm, file_of):
    batch = TokenBatch(random_ids(2, WINDOW))
    lm.train_step_batch(batch)
    lm.accumulate_step(batch)
    before = _state(lm)
    lm.evaluate_file(file_of(5 * WINDOW), 2, WINDOW)
    assert all(torch.equal(a, b) for a, b in zip(before, _state(lm), strict=True))


def _state(lm) -> list[torch.Tensor]:
    tensors = [weight for _, weight in lm.weights()]
    tensors += [moment for _, *pair in lm.moments() for moment in pair]
    tensors += [p.grad for p in lm.module.parameters()]
    return [*(each.detach().clone() for each in tensors), torch.random.get_rng_state()]
