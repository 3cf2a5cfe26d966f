"""The plain model that is raced against is the same model: it loses what ours loses."""

from dataclasses import replace

import pytest
import torch
from models import DENSE, MOE, batch, model

from bench.plain_model import PlainModel
from fastbrain import LinearScaling, TransformerConfig

# strides of 16 bytes, which PyTorch's grouped product wants
ALIGNED = replace(MOE, head_dim=8, moe_d_ff=16)
SHAPES = {
    "dense": DENSE,
    "moe": ALIGNED,
    "three of four experts": replace(ALIGNED, experts_per_token=3),
    "no shared expert": replace(ALIGNED, shared_expert=False),
    "untied": replace(ALIGNED, tie_embeddings=False),
    "stretched": replace(DENSE, rope_scaling=LinearScaling(4.0), rope_base=500.0),
    "heavy auxiliary losses": replace(ALIGNED, aux_loss_weight=1.0, router_z_loss_weight=0.5),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_it_loses_what_ours_loses(config: TransformerConfig) -> None:
    lm = model(config)
    with torch.no_grad():
        for name, p in lm.module.named_parameters():
            # all 1, a norm in the wrong place would not show
            if name.endswith("norm.weight"):
                p.uniform_(0.5, 1.5)
    plain = PlainModel(config)
    plain.load_state_dict(lm.module.state_dict())
    tokens = batch(3, 20)
    ours = lm.accumulate_step(tokens).total()
    loss = plain(tokens.ids)
    loss.backward()
    torch.testing.assert_close(loss.detach(), ours)
    theirs = dict(plain.named_parameters())
    for name, p in lm.module.named_parameters():
        torch.testing.assert_close(theirs[name].grad, p.grad)


@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
def test_mixed_precision_is_traced_in_one_piece(name):
    """A peer in many pieces would be slower than it has to be."""
    plain = PlainModel(SHAPES[name])
    whole = torch.compile(plain, fullgraph=True, backend="aot_eager", dynamic=False)
    ids = batch(3, 20).ids
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = whole(ids), plain(ids)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in plain.parameters())
