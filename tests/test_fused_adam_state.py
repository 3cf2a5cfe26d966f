"""State dictionaries of FusedAdam: what loading takes, keeps and refuses."""

import copy

import pytest
import torch
from fused_adam_runs import bits, parameters, run

from fastbrain.optim import FusedAdam


def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path):
    params = parameters()
    optimizer = FusedAdam(params, lr=0.03)
    run(optimizer, params, 5)
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "state")
    run(optimizer, params, 5, first=5)
    saved = torch.load(tmp_path / "state")
    resumed = FusedAdam(saved["params"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.03
    run(resumed, saved["params"], 5, first=5)
    assert bits(saved["params"], resumed) == bits(params, optimizer)


def test_loading_writes_into_the_moments_that_are_there():
    params = parameters()
    optimizer = FusedAdam(params)
    run(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    before = [optimizer.state[p]["exp_avg"] for p in params]
    run(optimizer, params, 3, first=2)
    optimizer.load_state_dict(saved)
    for p, moment, index in zip(params, before, range(len(params)), strict=True):
        assert optimizer.state[p]["exp_avg"] is moment
        assert torch.equal(moment, saved["state"][index]["exp_avg"])
        assert int(optimizer.state[p]["step"]) == 2
    # two optimizers never share a moment
    other = FusedAdam(parameters())
    other.load_state_dict(optimizer.state_dict())
    ours = {x.data_ptr() for p in params for x in optimizer.state[p].values()}
    assert not ours & {x.data_ptr() for s in other.state.values() for x in s.values()}


def test_moments_are_fp32_whatever_was_saved():
    params = parameters()
    optimizer = FusedAdam(params)
    run(optimizer, params, 1)
    saved = optimizer.state_dict()
    saved["state"] = {
        i: {n: x.bfloat16() if n != "step" else x for n, x in state.items()}
        for i, state in saved["state"].items()
    }
    fresh = FusedAdam(parameters())
    fresh.load_state_dict(saved)
    moments = [x for s in fresh.state.values() for n, x in s.items() if n != "step"]
    assert moments
    assert all(x.dtype == torch.float32 for x in moments)


def changed(**values):
    """What makes the second parameter's state another."""
    return lambda saved: saved["state"][1].update(values)


def regrouped(**values):
    return lambda saved: saved["param_groups"][0].update(values)


def without(key, *where):
    def remove(saved):
        for part in where:
            saved = saved[part]
        del saved[key]

    return remove


SECOND = "state of parameter 1 of group 0"
UNFIT = {
    "broadcast": (changed(exp_avg=torch.zeros(1)), rf"{SECOND}: exp_avg .*\(7,\), got \(1,\)"),
    "scalar": (changed(exp_avg_sq=torch.zeros(())), rf"{SECOND}: exp_avg_sq .*\(7,\), got \(\)"),
    "reshaped": (changed(exp_avg=torch.zeros(1, 7)), rf"{SECOND}: exp_avg .*got \(1, 7\)"),
    "integers": (changed(exp_avg=torch.zeros(7).int()), rf"{SECOND}: exp_avg .*torch.int32"),
    "sparse": (changed(exp_avg=torch.zeros(7).to_sparse()), rf"{SECOND}: exp_avg must be dense"),
    "number": (changed(exp_avg=0.0), rf"{SECOND}: exp_avg must be a tensor"),
    "half-step": (changed(step=torch.tensor(1.5)), rf"{SECOND}: step must be whole"),
    "negative-step": (changed(step=-1), rf"{SECOND}: step must be whole and not negative"),
    "nan-step": (changed(step=torch.tensor(float("nan"))), rf"{SECOND}: step"),
    "endless-step": (changed(step=float("inf")), rf"{SECOND}: step"),
    "two-steps": (changed(step=torch.ones(2)), rf"{SECOND}: step"),
    "no-step": (without("step", "state", 1), rf"{SECOND} must have step, exp_avg, exp_avg_sq"),
    "no-moment": (without("exp_avg_sq", "state", 1), rf"{SECOND} must have"),
    "more": (changed(mu_product=torch.ones(())), rf"{SECOND} must have .*mu_product"),
    "whose": (lambda saved: saved["state"].update({9: {}}), r"got \[9\]"),
    "no-state": (without("state"), "must have state and param_groups"),
    "no-groups": (without("param_groups"), "must have state and param_groups"),
    "groups": (lambda saved: saved["param_groups"].pop(), "must have 2 groups, got 1"),
    "sizes": (lambda saved: saved["param_groups"][1]["params"].pop(), "group 1 must have 1 par"),
    "no-betas": (without("betas", "param_groups", 0), "betas"),
    "amsgrad": (regrouped(amsgrad=True), "amsgrad"),
    "maximize": (regrouped(maximize=True), "maximize"),
    "lr": (regrouped(lr=-0.1), "lr"),
    "lr-tensor": (regrouped(lr=torch.tensor(float("nan"))), "lr"),
    "betas": (regrouped(betas=(0.9, 1.5)), "betas"),
    "adam": (regrouped(decoupled_weight_decay=False), "not as Adam"),
}


@pytest.mark.parametrize(("change", "rule"), UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("started", [True, False], ids=["started", "fresh"])
def test_a_state_that_does_not_fit_changes_nothing(change, rule, started):
    def make():
        params = parameters()
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}]
        return params, FusedAdam(groups, lr=0.25)

    theirs, other = make()
    run(other, theirs, 2)
    saved = copy.deepcopy(other.state_dict())
    change(saved)
    params, optimizer = make()
    run(optimizer, params, 3 * started)
    before = copy.deepcopy(optimizer.state_dict())
    tensors = [x for state in optimizer.state.values() for x in state.values()]
    with pytest.raises(ValueError, match=rule):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert bits_of(after) == bits_of(before)
    now = [x for state in optimizer.state.values() for x in state.values()]
    assert all(x is y for x, y in zip(now, tensors, strict=True))


def bits_of(saved):
    return {
        (i, name): x.flatten().view(torch.uint8).tolist()
        for i, state in saved["state"].items()
        for name, x in state.items()
    }


@pytest.mark.parametrize(
    ("kind", "settings", "rule"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "not as Adam"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "betas, eps"),
        (torch.optim.Adagrad, {}, "betas"),
        (torch.optim.Adamax, {}, "exp_inf"),
        (torch.optim.NAdam, {"decoupled_weight_decay": True}, "mu_product"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_state_that_means_something_else_is_refused(kind, settings, rule):
    params = parameters()
    other = kind(params, **settings)
    run(other, params, 1)
    with pytest.raises(ValueError, match=rule):
        FusedAdam(parameters()).load_state_dict(other.state_dict())


def test_hooks_may_mend_a_state_and_see_it_loaded():
    params = parameters()
    optimizer = FusedAdam(params)
    run(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].view(1, 7)
    run(optimizer, params, 1, first=2)
    there = optimizer.state[params[1]]["exp_avg"]
    called = []

    def mend(_, state_dict):
        called.append("before")
        state_dict["state"][1]["exp_avg"] = state_dict["state"][1]["exp_avg"].view(7)

    def look(loaded):
        called.append("after")
        assert loaded.state[params[1]]["exp_avg"] is there
        assert torch.equal(there, saved["state"][1]["exp_avg"])

    hooks = [
        optimizer.register_load_state_dict_pre_hook(mend),
        optimizer.register_load_state_dict_post_hook(look),
    ]
    optimizer.load_state_dict(saved)
    assert called == ["before", "after"]
    for hook in hooks:
        hook.remove()
    # nor does loading leave hooks of its own behind
    optimizer.load_state_dict(saved)
    assert called == ["before", "after"]
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_count_may_be_a_number_and_a_state_absent():
    params = parameters()
    optimizer = FusedAdam(params)
    run(optimizer, params, 2, absent=lambda step: (0,))
    saved = optimizer.state_dict()
    assert 0 not in saved["state"]
    saved["state"] = {i: dict(state, step=5) for i, state in saved["state"].items()}
    other = FusedAdam(parameters())
    other.load_state_dict(saved)
    assert [int(state["step"]) for state in other.state.values()] == [5, 5, 5]
