"""FusedAdam: torch.optim.AdamW in other hands."""

import pytest
import torch
from fused_adam_runs import bits, parameters, run
from numerics import assert_accurate

from fastbrain import kernels
from fastbrain.kernels import fused, reference
from fastbrain.optim import FusedAdam

TWINS = pytest.mark.parametrize("twin", [reference, fused], ids=["reference", "fused"])


def by_all(make, steps=12, twin=reference, device="cpu", absent=lambda step: ()):
    """The parameters after these steps of FusedAdam, of AdamW, and of AdamW in FP64."""
    found = []
    for kind, dtype in (
        (FusedAdam, torch.float32),
        (torch.optim.AdamW, torch.float32),
        (torch.optim.AdamW, torch.float64),
    ):
        params = parameters(dtype, device)
        with kernels.use(twin):
            run(make(kind, params), params, steps, absent=absent)
        found.append([p.detach() for p in params])
    return found


def assert_adamw(*found):
    for ours, theirs, exact in zip(*found, strict=True):
        assert_accurate(ours, theirs, exact, torch.float32)


@TWINS
def test_defaults_are_those_of_adamw(twin, device):
    assert_adamw(*by_all(lambda kind, params: kind(params), twin=twin, device=device))


@TWINS
def test_settings_mean_what_they_mean_to_adamw(twin, device):
    settings = {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.3}
    assert_adamw(*by_all(lambda kind, params: kind(params, **settings), 12, twin, device))


@TWINS
def test_a_parameter_without_gradient_is_left_alone_and_keeps_its_count(twin, device):
    def absent(step):
        return (1, 3) if step % 3 else (0,) if step == 6 else ()

    assert_adamw(*by_all(lambda kind, ps: kind(ps, lr=0.1), 12, twin, device, absent))
    params = parameters(device=device)
    optimizer = FusedAdam(params)
    before = params[1].detach().clone()
    with kernels.use(twin):
        run(optimizer, params, 1, absent=lambda step: (1,))
    assert torch.equal(params[1], before)
    assert [int(optimizer.state[p]["step"]) if optimizer.state[p] else 0 for p in params] == [
        1, 0, 1, 1,
    ]  # fmt: skip


def test_one_call_per_distinct_count(monkeypatch):
    sizes = []

    def counted(params, *rest, **settings):
        sizes.append(len(params))
        reference.adam_step(params, *rest, **settings)

    monkeypatch.setattr("fastbrain.fused_adam.adam_step", counted)
    params = parameters()
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}])
    run(optimizer, params, 3, absent=lambda step: (0,) if step == 1 else ())
    assert sizes == [4, 3, 1, 3] or sizes == [4, 3, 3, 1]


def test_groups_have_their_own_settings():
    def make(kind, params):
        groups = [
            {"params": params[:1], "lr": 0.1},
            {"params": params[1:2], "betas": (0.5, 0.6)},
            {"params": params[2:3], "weight_decay": 0.7},
        ]
        optimizer = kind(groups, lr=0.01)
        optimizer.add_param_group({"params": params[3:], "eps": 0.1})
        return optimizer

    assert_adamw(*by_all(make))


def test_a_scheduler_sets_the_rate_of_each_step():
    found = []
    for kind, dtype in (
        (FusedAdam, torch.float32),
        (torch.optim.AdamW, torch.float32),
        (torch.optim.AdamW, torch.float64),
    ):
        params = parameters(dtype)
        optimizer = kind(params, lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(8):
            run(optimizer, params, 1, first=step)
            schedule.step()
        found.append([p.detach() for p in params])
    assert_adamw(*found)


def test_the_rate_may_be_a_tensor():
    assert_adamw(*by_all(lambda kind, params: kind(params, lr=torch.tensor(0.05))))


def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    p = torch.tensor([3.0], requires_grad=True)
    optimizer = FusedAdam([p], lr=0.5, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9.0
    assert p < 3.0
    assert optimizer.step(closure) < 9.0


@pytest.mark.parametrize("forth", [True, False], ids=["to-adamw", "from-adamw"])
def test_state_moves_between_adamw_and_this(forth):
    kinds = [FusedAdam, torch.optim.AdamW]
    found = []
    for order, dtype in (
        (kinds if forth else kinds[::-1], torch.float32),
        (kinds[1:] * 2, torch.float32),
        (kinds[1:] * 2, torch.float64),
    ):
        params = parameters(dtype)
        first = order[0](params, lr=0.05, weight_decay=0.2)
        run(first, params, 4, absent=lambda step: (1,) if step == 2 else ())
        second = order[1](params)
        second.load_state_dict(first.state_dict())
        run(second, params, 4, first=4)
        found.append([p.detach() for p in params])
    assert_adamw(*found)


REFUSED = {
    "amsgrad": ({"amsgrad": True}, "amsgrad"),
    "maximize": ({"maximize": True}, "maximize"),
    "foreach": ({"foreach": True}, "foreach"),
    "capturable": ({"capturable": True}, "capturable"),
    "differentiable": ({"differentiable": True}, "differentiable"),
    "lr": ({"lr": -1.0}, "lr"),
    "nan": ({"lr": float("nan")}, "lr"),
    "lr-tensor": ({"lr": torch.tensor(-1.0)}, "lr"),
    "nan-tensor": ({"lr": torch.tensor(float("nan"))}, "lr"),
    "lr-word": ({"lr": "fast"}, "lr"),
    "eps": ({"eps": -1e-8}, "eps"),
    "decay": ({"weight_decay": -0.1}, "weight_decay"),
    "decay-tensor": ({"weight_decay": torch.tensor(0.1)}, "weight_decay"),
    "beta": ({"betas": (0.9, 1.0)}, "betas"),
    "one-beta": ({"betas": 0.9}, "betas"),
}


@pytest.mark.parametrize(("settings", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_offered_is_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        FusedAdam(parameters(), **settings)
    optimizer = FusedAdam(parameters())
    with pytest.raises(ValueError, match=named):
        optimizer.add_param_group({"params": parameters(), **settings})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("settings", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_offered_is_refused_when_set_later(settings, named):
    params = parameters()
    optimizer = FusedAdam(params)
    run(optimizer, params, 1)
    before = bits(params, optimizer)
    optimizer.param_groups[0].update(settings)
    with pytest.raises(ValueError, match=named):
        run(optimizer, params, 1, first=1)
    assert bits(params, optimizer) == before


def test_a_step_under_capture_is_refused(monkeypatch):
    params = parameters()
    optimizer = FusedAdam(params)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="counts updates on the host"):
        run(optimizer, params, 1)
    assert not optimizer.state
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run(optimizer, params, 1)
    assert int(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize(
    "p", [torch.ones(3, dtype=torch.bfloat16), torch.ones(4, 3).T], ids=["bf16", "transposed"]
)
def test_a_parameter_that_the_kernel_cannot_take_is_refused(p):
    with pytest.raises(ValueError, match="parameter 1 of the group must be"):
        FusedAdam([*parameters()[:1], p.requires_grad_()])


def test_a_sparse_gradient_is_refused():
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    with pytest.raises(ValueError, match="dense"):
        FusedAdam([p]).step()
