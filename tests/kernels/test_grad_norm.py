"""grad_norm: the size of all gradients together, whatever they are."""

import math

import pytest
import torch
from numerics import assert_accurate

from fastbrain.kernels import adam
from fastbrain.kernels.launch import launch


def exact_norm(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def assert_norm(norm, grads):
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    exact = torch.tensor(exact_norm(grads), dtype=torch.float64)
    assert_accurate(norm.cpu(), exact.float(), exact, torch.float32)


SHAPES = {
    "one-number": [()],
    "one-matrix": [(13, 7)],
    "block-edges": [(1023,), (1024,), (1025,)],
    "with-an-empty-one": [(0,), (5, 0), (0, 5), (3,)],
    "many": [(3, 2)] * 500,
    "stacked": [(4, 5, 6), (7,)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_norm_is_over_all_gradients(twin, device, shapes, dtype):
    grads = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    assert_norm(twin.grad_norm(grads), grads)


def test_gradients_of_both_dtypes_go_together(twin, device):
    grads = [torch.full((3,), 2.0, device=device), torch.ones(4, device=device).bfloat16()]
    for order in (grads, grads[::-1]):
        norm = twin.grad_norm(order)
        assert (norm.item(), norm.dtype) == (4.0, torch.float32)


def test_the_norm_of_nothing_is_zero(twin):
    norm = twin.grad_norm([])
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())


def test_gradients_may_lie_apart_in_memory(twin, device):
    grads = [torch.randn(6, 8, device=device)[:, ::2], torch.ones(1, 3, device=device).expand(5, 3)]
    assert_norm(twin.grad_norm(grads), grads)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_shows_in_the_norm(twin, device, value, dtype):
    grads = [torch.randn(20, 7, device=device).to(dtype) for _ in range(3)]
    grads[1][19, 6] = value
    norm = twin.grad_norm(grads)
    assert norm.isnan() if math.isnan(value) else norm == math.inf


@pytest.mark.parametrize("shape", [(4096, 4096), (1 << 24,), (1, 1 << 24)], ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["all-0.1", "normal"])
@pytest.mark.slow
def test_the_norm_of_16_million_numbers_is_exact(twin, device, shape, even):
    grad = torch.full(shape, 0.1, device=device) if even else torch.randn(shape, device=device)
    assert_norm(twin.grad_norm([grad]), [grad])


def test_partial_sums_are_added_in_fp64(device):
    # in FP32 a lane that holds 1 loses every one of the 1023 small sums that follow
    lanes = 16
    partial = torch.full((1024, lanes), 2.0**-24, device=device)
    partial[0] = 1
    norm = torch.empty((), device=device)
    launch(adam._root_kernel, (1,), partial, norm, partial.numel(), BLOCK=lanes, num_warps=1)
    exact = partial.double().sum().sqrt()
    assert_accurate(norm, exact.float(), exact, torch.float32)


def test_the_norm_of_a_wide_row_is_exact(twin, device):
    grads = [torch.full((1 << 20,), 0.1, device=device)]
    assert_norm(twin.grad_norm(grads), grads)
