"""Adapters in any training loop: whoever writes them, answers follow, and nothing is kept."""

from dataclasses import replace

import pytest
import torch
from models import SHAPES, batch, model

from fastbrain import InvalidConfig, LoraConfig, Optimizer, TransformerLm
from fastbrain.layers import Weight
from fastbrain.optim import FusedAdam


@pytest.fixture(params=SHAPES)
def lm(request):
    return model(SHAPES[request.param], Optimizer.adam(1e-2))


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.AdamW(p, 0.1, fused=True),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: FusedAdam(p, 0.1),
    ],
    ids=["fused-adamw", "fused-sgd", "adamw", "ours"],
)
def test_an_answer_follows_the_steps_of_any_optimizer(lm, kind):
    """PyTorch's fused ones write parameters and leave no trace in their versions."""
    lm.add_lora(LoraConfig(2, alpha=8.0))
    optimizer = kind([p for p in lm.module.parameters() if p.requires_grad])
    scored = batch(2, 9)
    before = float(lm.evaluate(scored).lm_loss)
    for _ in range(3):
        lm.accumulate_step(batch(4, 12))
        optimizer.step()
        optimizer.zero_grad()
    after = float(lm.evaluate(scored).lm_loss)
    assert after != before
    lm.merge_lora()
    assert after == pytest.approx(float(lm.evaluate(scored).lm_loss), rel=1e-5)


def test_training_keeps_no_copy_of_what_was_folded_for_an_answer(lm):
    lm.add_lora(LoraConfig(2))
    lm.evaluate(batch(2, 9))
    weights = [m for m in lm.module.modules() if isinstance(m, Weight) and m.adapter is not None]
    assert all(weight._folded is not None for weight in weights)
    lm.accumulate_step(batch(2, 9))
    assert all(weight._folded is None for weight in weights)


def test_a_parameter_that_is_thawed_gets_moments(lm):
    lm.add_lora(LoraConfig(2))
    lm.train_step_batch(batch(2, 9))
    lm.module.embedding.weight.requires_grad_(True)
    before = lm.module.embedding.weight.detach().clone()
    lm.train_step_batch(batch(2, 9))
    assert not torch.equal(lm.module.embedding.weight, before)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"rank": 13},
            r"narrowest side of a projection, n_kv_heads \* head_dim, which is 12",
        ),
        ({"rank": 2, "alpha": 0.0}, "lora.alpha must be above 0"),
    ],
)
def test_adapters_that_make_no_sense_are_refused(lora, message):
    with pytest.raises(InvalidConfig, match=message):
        TransformerLm(replace(SHAPES["moe"], lora=LoraConfig(**lora)), seed=1)
