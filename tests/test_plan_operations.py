"""The planner's list of operations against what a step really computes, moves and launches."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastbrain import TokenBatch, TransformerConfig, TransformerLm, kernels
from fastbrain.kernels import fused
from fastbrain.kernels.closed_forms import name_of, work_of
from fastbrain.kernels.launch import HOME, recorded
from fastbrain.plan import training_step

B, S = 4, 512
CONFIG = TransformerConfig(
    vocab_size=512,
    d_model=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=1,
    d_ff=704,
    moe_d_ff=192,
    moe_layers=(1,),
    max_seq_len=512,
)
SMALL = TransformerConfig(
    vocab_size=96,
    d_model=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=80,
    moe_layers=(),
    max_seq_len=32,
)


@pytest.fixture(scope="module")
def launched() -> dict[str, Counter]:
    """Bytes of the kernels that one step of `CONFIG` launches, by kernel, and their number."""
    found = {"bytes": Counter(), "launches": Counter()}
    ids = torch.zeros(B, S, dtype=torch.int64, device="meta")
    mask = torch.ones(B, S, dtype=torch.bool, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        # PyTorch knows no autocast on meta tensors, not even one that is off
        patch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
        module = TransformerLm(CONFIG, seed=1).module.to("meta")
        module.mixed_precision = True
        with kernels.use(fused), recorded(HOME) as launches:
            loss, count, auxiliary = module(ids, targets=ids, mask=mask)
            (loss / count + auxiliary).backward()
    for launch in launches:
        found["bytes"][name_of(launch)] += work_of(launch).bytes
        found["launches"][name_of(launch)] += 1
    return found


GROUPS = {
    "norms": (("norm.",), ("norms", "norms backward", "last norm")),
    "rotary": (("rope.",), ("rotary",)),
    "swiglu": (("activation.",), ("SwiGLU", "shared expert SwiGLU")),
    "attention forward": (("attention.fwd",), ("attention forward",)),
    "attention backward": (("attention.bwd",), ("attention backward",)),
    "experts": (
        ("experts.hidden", "grouped_gemm."),
        (
            "experts gate, up",
            "experts down",
            "experts hidden gradient",
            "experts input gradient",
            "experts weight gradients",
        ),
    ),
    "tokens": (("experts.tokens",), ("experts back to tokens",)),
    "loss": (("chunked_head.row",), ("loss",)),
}


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_move_the_bytes_of_the_plan(group, launched):
    prefixes, names = GROUPS[group]
    counted = sum(n for kernel, n in launched["bytes"].items() if kernel.startswith(prefixes))
    planned = sum(op.bytes for op in training_step(CONFIG, B, S, bf16=True) if op.name in names)
    # partial sums and tables of angles are not in the plan
    assert planned == pytest.approx(counted, rel=0.1)


def test_attention_starts_as_many_kernels_as_planned(launched):
    planned = {op.name: op.launches for op in training_step(CONFIG, B, S, bf16=True)}
    assert launched["launches"]["attention.fwd"] == planned["attention forward"]
    backward = launched["launches"]["attention.bwd_dq"] + launched["launches"]["attention.bwd_dkv"]
    assert backward == planned["attention backward"]


def test_dense_products_are_those_that_pytorch_counts():
    lm = TransformerLm(SMALL, seed=1)
    ids = torch.randint(SMALL.vocab_size, (2, 32))
    with FlopCounterMode(display=False) as counter:
        lm.accumulate_step(TokenBatch(ids))
    by_operator = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in by_operator.items() if "mm" in str(op))
    # the last position of a row predicts nothing, and the head leaves it out
    N, rows, D, V = 64, 62, SMALL.d_model, SMALL.vocab_size
    left_out = 6 * (N - rows) * D * V
    # the counter knows no addmm_, which is the head's weight gradient, and counts a norm's sum
    not_counted = 2 * rows * D * V - (2 * SMALL.n_layers + 1) * 2 * N * D
    planned = sum(op.flops for op in training_step(SMALL, 2, 32, False) if op.rate == "products")
    assert products + not_counted == planned - left_out


def test_operations_scale_with_layers_and_accumulation():
    once = {op.name: op for op in training_step(CONFIG, B, S, bf16=True)}
    twice = {op.name: op for op in training_step(CONFIG, B, S, bf16=True, accumulate=2)}
    assert twice["attention forward"].flops == 2 * once["attention forward"].flops
    added = twice["adding gradients up"].bytes
    assert added == 12 * CONFIG.parameter_counts().total
    assert twice["Adam"].bytes == once["Adam"].bytes == 30 * CONFIG.parameter_counts().total
