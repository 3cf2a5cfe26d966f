"""A position is scored against the token after it: in a model whose losses a hand works out.

With attention and feed-forward switched off a transformer is a table of bigrams: what it says after
a token depends on that token alone. A shift or a mask that is off by one gives other pairs.
"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from models import DENSE, SHAPES, model, random_ids

from fastbrain import TokenBatch, TokenFile, TransformerConfig, TransformerLm


def bigrams(config: TransformerConfig) -> tuple[TransformerLm, list[list[float]]]:
    """Such a model, and its table: the loss in nats of the second token after the first."""
    lm = model(config)
    with torch.no_grad():
        for name, weight in lm.weights():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        embedding = lm.module.embedding.weight
        embedding.copy_(torch.randn_like(embedding) / 3)
        x, head = embedding.double(), lm.module.head.weight.double()
        x = x / (x.square().mean(1, keepdim=True) + config.rmsnorm_eps).sqrt()
        losses = -(x * lm.module.norm.weight.double() @ head.T).log_softmax(1)
    return lm, losses.tolist()


@pytest.fixture(params=SHAPES)
def bigram(request):
    return bigrams(SHAPES[request.param])


def by_hand(table: list[list[float]], pairs: list[tuple[int, int]]) -> float:
    return sum(table[first][second] for first, second in pairs) / len(pairs)


def test_the_loss_is_that_of_the_pairs_of_neighbors(bigram):
    lm, table = bigram
    rows = [[5, 7, 7, 30, 2], [36, 0], [1, 2, 3]]
    pairs = [(5, 7), (7, 7), (7, 30), (30, 2), (36, 0), (1, 2), (2, 3)]
    losses = lm.evaluate(TokenBatch(rows))
    assert int(losses.predicted) == 7
    assert math.isclose(float(losses.lm_loss), by_hand(table, pairs), rel_tol=1e-6)


def test_of_a_conversation_only_the_answers_count(bigram):
    lm, table = bigram
    batch = TokenBatch.supervised([([5, 7, 9], [30, 2]), ([], [4, 8, 1]), ([3], [36])])
    pairs = [(9, 30), (30, 2), (4, 8), (8, 1), (3, 36)]
    losses = lm.evaluate(batch)
    assert int(losses.predicted) == 5
    assert math.isclose(float(losses.lm_loss), by_hand(table, pairs), rel_tol=1e-6)


def test_what_stands_in_a_prompt_weighs_nothing(bigram):
    lm, _ = bigram
    losses = [
        float(lm.evaluate(TokenBatch.supervised([(prompt, [30, 2])])).lm_loss)
        for prompt in ([5, 7, 9], [9, 9, 9], [1, 36, 9])
    ]
    assert losses[0] == losses[1] == losses[2]
    other = float(lm.evaluate(TokenBatch.supervised([([5, 7, 8], [30, 2])])).lm_loss)
    assert other != losses[0], "the last token of a prompt predicts the first of the answer"


def test_a_file_is_scored_over_its_neighbors(bigram, tmp_path):
    lm, table = bigram
    ids = random_ids(96).tolist()
    TokenFile.write(tmp_path / "held.bin", ids)
    windows = [ids[i : i + 16] for i in range(0, 96, 16)]
    pairs = [pair for window in windows for pair in pairwise(window)]
    with TokenFile.open(tmp_path / "held.bin", 0) as tokens:
        losses = lm.evaluate_file(tokens, 4, 16)
    assert int(losses.predicted) == len(pairs) == 90
    assert math.isclose(float(losses.lm_loss), by_hand(table, pairs), rel_tol=1e-6)


def test_training_learns_the_token_after_and_no_other():
    # every token of the ring has one successor, 5 further
    lm = model(replace(DENSE, n_layers=1))
    lm.set_learning_rate(1e-2)
    for step in range(60):
        first = random_ids(8, 1, seed=step)
        lm.train_step_batch(TokenBatch((first + 5 * torch.arange(20)) % 37))
    ids = (5 * torch.arange(32).reshape(1, -1) + 11) % 37
    assert lm.module(ids).argmax(2).equal((ids + 5) % 37)
