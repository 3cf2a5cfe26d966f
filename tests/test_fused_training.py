"""Whole training steps on the kernels: the same losses, nothing waited for, nothing left out."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from models import batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastbrain import Optimizer, TokenBatch, TransformerConfig, TransformerLm, kernels
from fastbrain.kernels import fused, reference

MOE = TransformerConfig(
    vocab_size=37,
    d_model=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    d_ff=48,
    moe_d_ff=16,
    num_experts=4,
    experts_per_token=2,
    moe_layers=(1,),
    shared_expert=True,
    max_seq_len=32,
)
# the host learns a number from the device in each of these
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}


class Watch(TorchDispatchMode):
    """Refuses whatever makes the host wait for the device, and lists fastbrain's own operations."""

    def __init__(self):
        super().__init__()
        self.operations = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "fastbrain":
            self.operations.add(name)
        assert name not in WAITING, f"{name} waits for the device"
        if name in ("index", "index_put_", "_index_put_impl_"):
            masks = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
            assert not any(x.dtype == torch.bool for x in masks), "a boolean index waits"
        result = func(*args, **kwargs or {})
        if name == "_to_copy":
            assert result.device == args[0].device, "a copy to another device waits"
        return result


def model(mixed_precision):
    with warnings.catch_warnings():
        # mixed precision is slower than FP32 on most CPUs, and says so
        warnings.simplefilter("ignore")
        return TransformerLm(MOE, Optimizer.adam(3e-3), seed=1, mixed_precision=mixed_precision)


def losses_of(twin, mixed_precision, steps=4):
    lm = model(mixed_precision)
    found = []
    with kernels.use(twin):
        for step in range(steps):
            lm.zero_grad()
            found.append(lm.accumulate_step(batch(2, 16, seed=step % 3)).total())
            lm.step_clipped(1.0, 1.0)
    return torch.stack(found).tolist()


@pytest.mark.parametrize(
    ("mixed_precision", "relative"),
    [
        pytest.param(False, 1e-4, id="fp32", marks=pytest.mark.slow),
        pytest.param(True, 2e-2, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_a_model_trained_on_the_kernels_loses_what_it_loses_on_the_reference(
    mixed_precision, relative
):
    ours, theirs = (losses_of(twin, mixed_precision) for twin in (fused, reference))
    assert ours == pytest.approx(theirs, rel=relative)
    assert theirs[-1] < theirs[0] - 0.05


@pytest.mark.parametrize(
    "mixed_precision",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["fp32", "bf16"],
)
def test_a_step_runs_every_kernel_and_waits_for_nothing(mixed_precision, monkeypatch):
    lm = model(mixed_precision)
    data = batch(2, 16)
    for question in ("max_id", "predicted", "layout"):
        # the ids are the host's own: it may ask them what it likes
        monkeypatch.setattr(
            data, question, partial(lambda answer: answer, getattr(data, question)())
        )
    with kernels.use(fused), Watch() as seen:
        lm.train_step_batch(data)
        lm.accumulate_step(data)
        lm.step_clipped(1.0, 1.0)
    assert seen.operations == {
        *("activation_fwd", "activation_bwd", "adam_norm", "adam_step"),
        *("attention_fwd", "attention_bwd", "chunked_head_fwd", "expert_ffn_fwd", "expert_ffn_bwd"),
        *("norm_fwd", "norm_bwd", "rope_fwd", "rope_bwd"),
    }


@pytest.mark.parametrize("mixed_precision", [False, True], ids=["fp32", "bf16"])
def test_a_step_needs_no_number_from_the_device(mixed_precision, monkeypatch):
    # PyTorch knows no autocast on meta tensors, not even one that is off
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    # a meta tensor has none to give: whatever asked for one, inside an operation too, would fail
    lm = model(mixed_precision)
    lm.module.to("meta")
    lm._state.to(torch.device("meta"))
    with kernels.use(fused):
        losses = lm.train_step_batch(TokenBatch([list(range(16)), list(range(9))]))
        lm.accumulate_step(batch(2, 16))
        norm = lm.step_clipped(1.0, 1.0)
    assert losses.total().is_meta
    assert norm.is_meta
