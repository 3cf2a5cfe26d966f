"""What a model keeps between forward and backward, to the byte: the formula of docs/kernels.md."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from models import DENSE, MOE, model
from torch.autograd.graph import saved_tensors_hooks

from fastbrain import TransformerConfig, kernels
from fastbrain.kernels import fused, reference
from fastbrain.layers import Weight
from fastbrain.plan.saved import head_bytes, saved_bytes

B, S = 2, 24
WIDE = TransformerConfig(
    vocab_size=64,
    d_model=256,
    n_layers=1,
    n_heads=4,
    n_kv_heads=1,
    head_dim=64,
    d_ff=320,
    moe_d_ff=96,
    num_experts=16,
    experts_per_token=3,
    moe_layers=(),
    shared_expert=True,
    max_seq_len=32,
)
CONFIGS = {
    "small": replace(DENSE, head_dim=16),
    "wide": WIDE,
    "deep": replace(DENSE, head_dim=16, n_layers=5, n_kv_heads=1, tie_embeddings=False),
    "moe": replace(MOE, head_dim=16, shared_expert=False),
    "moe-shared": replace(MOE, head_dim=16, shared_expert=True),
    "moe-wide": replace(WIDE, n_layers=2, moe_layers=(1,)),
}


def counted(config: TransformerConfig, mixed_precision: bool, twin) -> int:
    """Bytes of distinct storages that a forward with loss saves, weights left out."""
    lm = model(config)
    lm.module.mixed_precision = mixed_precision
    # the kernels say what they would keep on tensors without data
    module = lm.module.to("meta") if twin is fused else lm.module
    device = module.embedding.weight.device
    ids = torch.zeros(B, S, dtype=torch.int64, device=device)
    mask = torch.ones(B, S, dtype=torch.bool, device=device)
    found = {}

    def pack(x):
        found[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with kernels.use(twin), saved_tensors_hooks(pack, lambda x: x):
        loss, count, auxiliary = module(ids, targets=ids, mask=mask, max_rows=B * (S - 1))
        total = loss / count.clamp(min=1) + auxiliary
    assert total.requires_grad
    shadows = [m.shadow for m in module.modules() if isinstance(m, Weight) and m.shadow is not None]
    for x in (*module.parameters(), *module.buffers(), *shadows):
        found.pop(x.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in found.values())


both_precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@both_precisions
@every_config
def test_a_step_on_the_kernels_keeps_what_the_plan_says(config, bf16, monkeypatch):
    # PyTorch knows no autocast on meta tensors, not even one that is off
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    assert counted(config, bf16, fused) == saved_bytes(config, B, S, bf16)


@both_precisions
@every_config
def test_a_step_on_the_cpu_keeps_what_the_plan_says(config, bf16):
    # its loss holds the gradients that it has ready without telling autograd
    ready = head_bytes(config, B * S, bf16, fused=False) - 8
    assert counted(config, bf16, reference) == saved_bytes(config, B, S, bf16, fused=False) - ready
