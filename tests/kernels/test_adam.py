"""adam_step: the update formula, and the numbers that steer it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from adam_cases import LISTS, MANY, Case, by_formula, make_case
from numerics import assert_accurate


@pytest.fixture
def case(device):
    return partial(make_case, device)


def assert_formula(twin, case, dtype=torch.float32):
    case = case.copy(dtype)
    ours, theirs, exact = case.stepped(twin), by_formula(case), by_formula(case.copy(torch.float64))
    assert ours.step == case.step + 1
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        for mine, plain, truth in zip(
            *(getattr(c, name) for c in (ours, theirs, exact)), strict=True
        ):
            assert_accurate(mine, plain, truth, dtype, name=name)


FP64_AND_FP32 = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], indirect=True)


@FP64_AND_FP32
@pytest.mark.parametrize("step", [0, 1, 49_999])
def test_a_step_is_the_formula(twin, case, step, dtype):
    assert_formula(twin, case(step=step, weight_decays=[0.1, 0.3]), dtype)


@FP64_AND_FP32
def test_the_first_step_from_zero_moments_is_the_formula(twin, case, dtype):
    # 1 - 0.999 in FP32 is off by 1.3e-5, and here it cancels only if both sides have it
    fresh = case()
    fresh.exp_avgs = [torch.zeros_like(m) for m in fresh.exp_avgs]
    fresh.exp_avg_sqs = [torch.zeros_like(v) for v in fresh.exp_avg_sqs]
    assert_formula(twin, fresh, dtype)


@FP64_AND_FP32
@pytest.mark.parametrize("betas", [(0.9, 0.9999), (0.9999, 0.999), (0.99999, 0.99999)])
@pytest.mark.parametrize("step", [0, 49_999])
def test_bias_is_corrected_by_powers_of_the_exact_betas(twin, case, betas, step, dtype):
    # from 0, lest a parameter swamp its update; in FP32 1 - 0.9999 is off by 1.7e-4
    fresh = case(betas=betas, step=step)
    fresh.params = [torch.zeros_like(p) for p in fresh.params]
    assert_formula(twin, fresh, dtype)


@FP64_AND_FP32
def test_betas_and_eps_are_those_given(twin, case, dtype):
    assert_formula(twin, case(betas=(0.5, 0.8), eps=0.3, step=2), dtype)


@FP64_AND_FP32
def test_gradients_are_scaled_and_clipped(twin, case, dtype):
    assert_formula(twin, case(grad_scale=0.3, clip=0.7, step=2), dtype)


def test_scaling_by_powers_of_two_equals_scaled_gradients(twin, case):
    scaled = case(grad_scale=0.25, clip=0.5)
    before = scaled.copy()
    ready = replace(before, grads=[g / 8 for g in before.grads], grad_scale=1.0, clip=1.0)
    ours, theirs = scaled.stepped(twin), ready.stepped(twin)
    assert [g.tolist() for g in ours.grads] == [g.tolist() for g in before.grads]  # only read
    assert replace(ours, grads=[]).bits() == replace(theirs, grads=[]).bits()


def test_each_parameter_decays_at_its_own_rate(twin, case):
    decayed = case((4,), (4,), weight_decays=[0.5, 0.0], lr=0.25)
    decayed.grads = [torch.zeros_like(g) for g in decayed.grads]
    decayed.exp_avgs = [torch.zeros_like(m) for m in decayed.exp_avgs]
    after = decayed.stepped(twin)
    assert torch.equal(after.params[0], decayed.params[0] * (1 - 0.25 * 0.5))
    assert torch.equal(after.params[1], decayed.params[1])


@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 1023, 1024, 1025, 2048, 3000])
def test_neighbors_in_memory_are_untouched(twin, device, size):
    # a guard around every tensor, 16 bytes from its ends
    buffers = {
        name: torch.full((size + 16,), 7.0, device=device).to(
            torch.bfloat16 if name == "shadows" else torch.float32
        )
        for name in LISTS
    }
    views = {name: buffer[8 : size + 8] for name, buffer in buffers.items()}
    for view in views.values():
        view.copy_(torch.rand(size, device=device))
    guarded = Case(**{n: [v] for n, v in views.items()}, weight_decays=[0.1], step=3)
    expected = by_formula(guarded.copy(torch.float64))
    theirs = by_formula(guarded)
    guarded.run(twin)
    assert_accurate(views["params"], theirs.params[0], expected.params[0], torch.float32)
    for buffer in buffers.values():
        assert (buffer[:8] == 7).all()
        assert (buffer[size + 8 :] == 7).all()
        assert buffer[8 : size + 8].isfinite().all()


def test_an_absent_gradient_is_zero(twin, case):
    absent = case(weight_decays=[0.1, 0.2], step=4)
    absent.grads[1] = torch.empty(0, device=absent.params[0].device)
    zero = absent.copy()
    zero.grads[1] = torch.zeros_like(zero.params[1])
    ours, theirs = absent.stepped(twin), zero.stepped(twin)
    assert replace(ours, grads=[]).bits() == replace(theirs, grads=[]).bits()
    assert not torch.equal(ours.exp_avgs[1], absent.exp_avgs[1])
    assert not torch.equal(ours.params[1], absent.params[1])


def test_an_absent_shadow_changes_nothing_else(twin, case):
    absent = case(step=4)
    absent.shadows[0] = torch.empty(0, dtype=torch.bfloat16, device=absent.params[0].device)
    present = case(step=4, **{n: getattr(absent, n) for n in LISTS[:-1]})
    ours, theirs = absent.stepped(twin), present.stepped(twin)
    assert torch.equal(ours.shadows[1], theirs.shadows[1])
    assert replace(ours, shadows=[]).bits() == replace(theirs, shadows=[]).bits()


def test_a_shadow_is_the_new_parameter_rounded(twin, case):
    before = case((300,))
    after = before.stepped(twin)
    assert torch.equal(after.shadows[0], after.params[0].bfloat16())
    assert not torch.equal(after.shadows[0], before.params[0].bfloat16())


def test_bf16_gradients_are_read_exactly(twin, case):
    narrow = case(grad_scale=0.3)
    narrow.grads = [g.bfloat16() for g in narrow.grads]
    equal = narrow.copy()
    equal.grads = [g.float() for g in narrow.grads]
    ours, theirs = narrow.stepped(twin), equal.stepped(twin)
    assert replace(ours, grads=[]).bits() == replace(theirs, grads=[]).bits()


@pytest.mark.parametrize("skip", [1, 2, -1])
@pytest.mark.parametrize("broken", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit(twin, case, skip, broken):
    skipped = case(skip=skip, step=5, weight_decays=[0.1, 0.1])
    skipped.grads[0].mul_(broken)
    assert skipped.stepped(twin).bits() == skipped.bits()


def test_parameters_that_want_a_gradient_are_updated_in_place(twin, case):
    wanting = case((4,))
    expected = wanting.stepped(twin)
    wanting.params[0].requires_grad_()
    wanting.run(twin)
    assert torch.equal(wanting.params[0].detach(), expected.params[0])
    assert wanting.params[0].is_leaf


@FP64_AND_FP32
def test_thirty_steps_follow_pytorch(twin, case, dtype):
    ours = case((6, 4), (5,), lr=2.0**-7, weight_decays=[0.25, 0.25]).copy(dtype)
    ours.exp_avgs = [torch.zeros_like(m) for m in ours.exp_avgs]
    ours.exp_avg_sqs = [torch.zeros_like(v) for v in ours.exp_avg_sqs]
    peers = []
    for wide in (dtype, torch.float64):
        params = [p.to(wide, copy=True).requires_grad_() for p in ours.params]
        settings = {"lr": ours.lr, "betas": ours.betas, "eps": ours.eps, "weight_decay": 0.25}
        peers.append((params, torch.optim.AdamW(params, **settings, foreach=False)))
    for _ in range(30):
        ours.grads = [torch.randn_like(g) for g in ours.grads]
        ours.run(twin)
        for params, optimizer in peers:
            for p, g in zip(params, ours.grads, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
    assert ours.step == 30
    for mine, theirs, exact in zip(ours.params, *(params for params, _ in peers), strict=True):
        assert_accurate(mine, theirs.detach(), exact.detach(), dtype)


def test_tensors_of_all_sizes_go_together(twin, case):
    # absent gradients and shadows, BF16 gradients and an empty tensor between the others
    many = case(*MANY, step=2, weight_decays=[0.1 * i for i in range(len(MANY))])
    none = torch.empty(0, device=many.params[0].device)
    many.grads[1], many.grads[3] = none, many.grads[3].bfloat16()
    many.shadows[2] = many.shadows[4] = none.bfloat16()
    ours, theirs, exact = many.stepped(twin), by_formula(many), by_formula(many.copy(torch.float64))
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        for lists in zip(*(getattr(c, name) for c in (ours, theirs, exact)), strict=True):
            assert_accurate(*lists, torch.float32, name=name)
    for i in (0, 1, 3, 5, 6):
        assert torch.equal(ours.shadows[i], ours.params[i].bfloat16())


@pytest.mark.parametrize("name", LISTS)
def test_a_tensor_may_start_anywhere(twin, case, name):
    aligned = case((2500,), (3,), step=2, weight_decays=[0.1, 0.1])
    moved = aligned.copy()
    x = getattr(moved, name)[0]
    getattr(moved, name)[0] = torch.cat([x[:1], x])[1:]
    assert getattr(moved, name)[0].data_ptr() % 16
    assert moved.stepped_in_place(twin).bits() == aligned.stepped(twin).bits()


def test_equal_steps_give_equal_bits(twin, case):
    given = case(*MANY, step=3)
    seen = given.stepped(twin).bits()
    assert all(given.stepped(twin).bits() == seen for _ in range(4))
