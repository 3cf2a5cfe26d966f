"""The tolerance rule refuses what it should, and the tests start where they should."""

import os

import pytest
import torch
from numerics import SLACK, assert_accurate, assert_twins


def square(x):
    return x * x


@pytest.fixture
def inputs():
    return {"x": torch.randn(4, 3, requires_grad=True)}


@pytest.mark.parametrize("dtype", SLACK, ids=str)
def test_a_function_is_its_own_twin(inputs, dtype):
    assert_twins(square, square, inputs, dtype)


@pytest.mark.parametrize("dtype", SLACK, ids=str)
def test_an_error_over_the_budget_is_refused(inputs, dtype):
    def off(x):
        worst = float(x.detach().abs().max()) ** 2
        return x * x + 4 * SLACK[dtype] * worst

    with pytest.raises(AssertionError, match="out0: error"):
        assert_twins(off, square, inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_error_within_the_budget_is_allowed(dtype):
    exact = torch.tensor([1.0, 100.0], dtype=torch.float64)
    theirs = exact.to(dtype)
    within, beyond = (theirs + share * 100 * SLACK[dtype] for share in (0.9, 1.1))
    assert_accurate(within, theirs, exact, dtype)
    with pytest.raises(AssertionError, match="over budget"):
        assert_accurate(beyond, theirs, exact, dtype)


def test_twice_the_error_of_the_definition_is_allowed():
    exact = torch.tensor([1.0], dtype=torch.float64)
    assert_accurate(exact.float() + 0.19, exact.float() - 0.1, exact, torch.float32)
    with pytest.raises(AssertionError, match="over budget"):
        assert_accurate(exact.float() + 0.21, exact.float() - 0.1, exact, torch.float32)


def test_a_wrong_gradient_is_refused(inputs):
    with pytest.raises(AssertionError, match="dx: error"):
        assert_twins(
            lambda x: x * x.detach() + square(x).detach() - square(x.detach()),
            square,
            inputs,
            torch.float32,
        )


def test_a_missing_gradient_is_refused(inputs):
    inputs["y"] = torch.ones(3, requires_grad=True)
    with pytest.raises(AssertionError, match="dy: error"):
        assert_twins(lambda x, y: x * y.detach(), lambda x, y: x * y, inputs, torch.float32)


def test_nan_is_refused(inputs):
    with pytest.raises(AssertionError, match="out0: error nan"):
        assert_twins(lambda x: x * x + float("nan"), square, inputs, torch.float32)


def test_another_shape_or_dtype_is_refused(inputs):
    with pytest.raises(AssertionError, match="shape"):
        assert_twins(lambda x: x.detach()[:1], lambda x: x.detach()[:, :1], inputs, torch.float64)
    with pytest.raises(AssertionError, match=r"torch\.float32, not torch\.bfloat16"):
        assert_twins(lambda x: square(x).float(), square, inputs, torch.bfloat16)


def test_the_truth_is_of_the_rounded_inputs():
    seen = []

    def op(x):
        seen.append(x.double())
        return x

    assert_twins(op, op, {"x": torch.tensor([1 / 3])}, torch.bfloat16)
    assert len(seen) == 3
    assert all(x == torch.tensor([1 / 3]).bfloat16() for x in seen)


def test_incoming_gradients_are_rounded_alike():
    seen = []

    class Record(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append(dy.double())
            return dy

    assert_twins(
        Record.apply, Record.apply, {"x": torch.ones(9, requires_grad=True)}, torch.bfloat16
    )
    assert len(seen) == 3
    assert all(torch.equal(dy, seen[0]) for dy in seen)


def test_named_inputs_stay_fp32(inputs):
    seen = []

    def op(x, y):
        seen.append((x.dtype, y.dtype))
        return x * y.to(x.dtype)

    assert_twins(op, op, inputs | {"y": torch.ones(3)}, torch.bfloat16, fp32=["y"])
    assert set(seen) == {(torch.bfloat16, torch.float32), (torch.float64, torch.float64)}


def test_where_the_truth_is_zero_the_size_is_given(inputs):
    def nearly(x):
        return x * 1e-7

    assert_twins(nearly, lambda x: x * 0, inputs, torch.float32, scale={"out0": 1.0, "dx": 1.0})
    with pytest.raises(AssertionError, match="over budget"):
        assert_twins(nearly, lambda x: x * 0, inputs, torch.float32)


def test_unwritten_memory_is_nan():
    assert torch.empty(1000).isnan().all()


def test_every_test_starts_from_one_seed():
    assert torch.initial_seed() == 0
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(0)))


def test_operations_without_a_deterministic_form_fail():
    place, value = torch.tensor([0, 0]), torch.ones(2)
    with pytest.raises(UserWarning, match="deterministic"):
        torch.ones(3).put_(place, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_kernels_run_in_the_interpreter_without_a_gpu():
    assert os.environ["TRITON_INTERPRET"] == "1"
