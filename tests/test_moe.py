"""Routing against a loop in float64: ties, padding, idle experts, one expert, all of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import MOE

from fastbrain.moe import MixtureOfExperts

CASES = {
    "2 of 4": {},
    "1 of 4": {"experts_per_token": 1},
    "all of 4": {"experts_per_token": 4},
    "1 of 1": {"num_experts": 1, "experts_per_token": 1},
    "unshared": {"shared_expert": False},
    "no losses": {"aux_loss_weight": 0.0, "router_z_loss_weight": 0.0},
}


def layer(**changes):
    config = replace(MOE, **changes)
    torch.manual_seed(1)
    moe = MixtureOfExperts(config).double()
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(std=0.4)
    return config, moe


def naive(moe, config, x, valid):
    """The layer written out token by token; returns output and auxiliary loss."""
    E, k = config.num_experts, config.experts_per_token
    out, chosen_slots = [], torch.zeros(E, dtype=torch.float64)
    mean_p, squares = torch.zeros(E, dtype=torch.float64), 0.0
    for t, row in enumerate(x):
        y = torch.zeros_like(row)
        if moe.shared is not None:
            y = y + swiglu(row, moe.shared.gate_up.weight, moe.shared.down.weight)
        if valid[t]:
            logits = moe.router @ row
            p = logits.softmax(0)
            left, chosen = p.detach().clone(), []
            for _ in range(k):
                best = max(range(E), key=lambda e: (float(left[e]), -e))
                chosen.append(best)
                left[best] = -1
            total = sum(p[e] for e in chosen)
            for e in chosen:
                y = y + p[e] / total * swiglu(row, moe.gate_up.weight[e], moe.down.weight[e])
                chosen_slots[e] += 1
            mean_p = mean_p + p
            squares = squares + logits.logsumexp(0) ** 2
        out.append(y)
    n = int(valid.sum())
    balance = E * (chosen_slots / (n * k) * mean_p / n).sum()
    return (
        torch.stack(out),
        config.aux_loss_weight * balance + config.router_z_loss_weight * squares / n,
    )


def swiglu(row, gate_up, down):
    gate, up = (gate_up @ row).chunk(2)
    return down @ (F.silu(gate) * up)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("pads", [0, 3])
def test_the_layer_is_the_loop_gradients_included(changes, pads):
    config, moe = layer(**changes)
    x = torch.randn(11, config.d_model, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(11) < 11 - pads
    y, auxiliary = moe(x, valid if pads else None)
    expected, expected_auxiliary = naive(moe, config, x, valid)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(auxiliary, expected_auxiliary)
    weight = torch.randn_like(y)
    parameters = [x, *moe.parameters()]
    ours = torch.autograd.grad((y * weight).sum() + auxiliary, parameters, allow_unused=True)
    theirs = torch.autograd.grad(
        (expected * weight).sum() + expected_auxiliary, parameters, allow_unused=True
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None) or bool((b if a is None else a).eq(0).all())
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


def test_the_lower_expert_wins_a_tie():
    _, moe = layer(shared_expert=False)
    with torch.no_grad():
        moe.router.zero_()  # every expert is as likely
        moe.down.weight[2:] = 1e6  # visible, were they chosen
    y, _ = moe(torch.randn(5, MOE.d_model, dtype=torch.float64), None)
    assert bool((y.abs() < 1e3).all())


def test_all_tokens_on_one_expert_leave_the_others_without_gradient():
    _, moe = layer(experts_per_token=1)
    x = torch.randn(9, MOE.d_model, dtype=torch.float64).abs()
    with torch.no_grad():
        moe.router.fill_(-1)
        moe.router[3].fill_(1)
    y, auxiliary = moe(x, None)
    (y.square().sum() + auxiliary).backward()
    assert bool(moe.down.weight.grad[3].any())
    assert bool((moe.down.weight.grad[:3] == 0).all())
    # all on one expert is the worst balance there is: aux * E
    worst = MOE.aux_loss_weight * MOE.num_experts
    assert float(auxiliary.detach()) > 0.9 * worst


def test_padding_reaches_the_shared_expert_alone():
    config, moe = layer()
    x = torch.randn(4, config.d_model, dtype=torch.float64)
    y, _ = moe(x, torch.tensor([True, True, True, False]))
    torch.testing.assert_close(y[3], moe.shared(x)[3])


def test_probabilities_that_underflow_do_not_divide_by_zero():
    _, moe = layer()
    with torch.no_grad():
        moe.router.mul_(1e5)
    y, auxiliary = moe(torch.randn(6, MOE.d_model, dtype=torch.float64), None)
    assert bool(y.isfinite().all())
    assert bool(auxiliary.isfinite())
