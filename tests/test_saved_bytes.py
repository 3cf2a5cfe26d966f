"""What a layer keeps between forward and backward, to the byte: the formula of docs/kernels.md."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from models import DENSE, MOE, model
from torch.autograd.graph import saved_tensors_hooks

from fastbrain import TransformerConfig, kernels
from fastbrain.kernels import fused, tiles
from fastbrain.layers import Weight, attend_within

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
    "moe": replace(MOE, head_dim=16, shared_expert=False),
    "moe-shared": replace(MOE, head_dim=16, shared_expert=True),
    "moe-wide": replace(WIDE, n_layers=2, moe_layers=(1,)),
}


def closed_form(c: TransformerConfig, moe: bool, a: int) -> int:
    """Bytes that one layer saves; activations have `a` bytes, statistics and the stream FP32."""
    N = B * S
    heads = c.n_heads + c.n_kv_heads
    # two norms, their outputs, projections, turned heads, attention's output and log-sum-exp
    token = (8 + 2 * a) * c.d_model + 8 + 3 * a * c.head_dim * heads + 4 * c.n_heads
    if not moe:
        return N * (token + 3 * a * c.d_ff)
    E, k, F = c.num_experts, c.experts_per_token, c.moe_d_ff
    # gate and up rows of each choice, its row and slot, and the router's own
    token += 2 * a * k * F + 8 * k + 8 * k + 16 * E + 9
    token += 3 * a * F if c.shared_expert else 0
    rows = tiles.group_rows("sm_86", a)["BLOCK_M"]
    num_tiles = -(-N * k // rows) + E
    return N * token + 12 * num_tiles + 12 * E + 4


def saved_by_trunk(config: TransformerConfig, mixed_precision: bool) -> int:
    """Bytes of distinct storages that the blocks and the last norm save, weights left out."""
    lm = model(config)
    lm.module.mixed_precision = mixed_precision
    module = lm.module.to("meta")
    ids = torch.zeros(B, S, dtype=torch.int64, device="meta")
    found = {}

    def pack(x):
        found[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    attends = [attend_within(None)] * config.n_layers
    with kernels.use(fused), saved_tensors_hooks(pack, lambda x: x):
        module.trunk(ids, attends, None, None)
    shadows = [m.shadow for m in module.modules() if isinstance(m, Weight) and m.shadow is not None]
    for x in (*module.parameters(), *module.buffers(), *shadows):
        found.pop(x.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("mixed_precision", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_saves_what_the_closed_form_says(config, mixed_precision, monkeypatch):
    # PyTorch knows no autocast on meta tensors, not even one that is off
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    last = config.n_layers - 1
    moe = config.is_moe(last)
    fewer = replace(config, n_layers=last or 1, moe_layers=())
    more = replace(fewer, n_layers=fewer.n_layers + 1, moe_layers=(fewer.n_layers,) if moe else ())
    layer = saved_by_trunk(more, mixed_precision) - saved_by_trunk(fewer, mixed_precision)
    assert layer == closed_form(config, moe, 2 if mixed_precision else 4)
