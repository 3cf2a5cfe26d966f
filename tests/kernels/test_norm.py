"""rms_norm: the residual stream, what is added to it, and its scaled copy."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain.kernels import reference

EPS = 1e-6


def by_row(x, weight, eps=EPS, residual=None, dtype=None):
    """One row at a time."""
    rows = wide(x) if residual is None else wide(x) + wide(residual)
    y = [row / ((row * row).mean() + eps).sqrt() * weight for row in rows]
    stream = x if residual is None else rows.to(residual.dtype)
    return torch.stack(y).to(dtype or x.dtype), stream


@pytest.fixture
def inputs(randn):
    """x, weight and residual of three rows."""

    def make(D=16, residual=True, N=3):
        made = {"x": randn(N, D), "weight": randn(D), "residual": randn(N, D)}
        return made if residual else {n: x for n, x in made.items() if n != "residual"}

    return make


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("D", [1, 7, 64, 1025])
def test_rows_are_scaled_to_a_mean_square_of_one(inputs, D, residual, dtype):
    op = partial(reference.rms_norm, eps=EPS)
    # of one column y is +-weight whatever x is: its gradient is all but 0
    scale = {"dx": 1.0, "dresidual": 1.0} if D == 1 else {}
    assert_twins(op, by_row, inputs(D, residual), dtype, fp32=["weight"], scale=scale)


@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=["x-fp32", "x-bf16"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["h-fp32", "h-bf16"])
@pytest.mark.parametrize(
    "out", [None, torch.float32, torch.bfloat16], ids=["y-x", "y-fp32", "y-bf16"]
)
def test_x_residual_and_output_have_their_own_dtypes(inputs, x, stream, out):
    def mixed(op):
        def run(x, weight, residual):
            x, residual = x.to(dtypes[0]), residual.to(dtypes[1])
            return op(x, weight, EPS, residual=residual, dtype=dtypes[2])

        dtypes = (x, stream, out)
        return run

    def truth(x, weight, residual):
        if x.dtype == torch.float64:
            return by_row(x, weight, residual=residual)
        return mixed(by_row)(x, weight, residual)

    given = inputs()
    given = {n: v.detach().bfloat16().float().requires_grad_() for n, v in given.items()}
    assert_twins(mixed(reference.rms_norm), truth, given, torch.bfloat16, fp32=list(given))


def test_gradients_are_the_slopes(inputs):
    given = [x.detach().double().requires_grad_() for x in inputs(D=4).values()]

    def op(x, weight, residual):
        return reference.rms_norm(x, weight, 1e-2, residual)

    assert torch.autograd.gradcheck(op, given)


def test_eps_is_added_to_the_mean_square(inputs, dtype):
    given = inputs()
    with torch.no_grad():
        given["x"].mul_(0.1)
        given["residual"].mul_(0.1)
    op, definition = partial(reference.rms_norm, eps=0.5), partial(by_row, eps=0.5)
    assert_twins(op, definition, given, dtype, fp32=["weight"])


def test_a_row_of_zeros_stays_finite(twin, inputs):
    given = inputs()
    with torch.no_grad():
        given["x"][1] = given["residual"][1] = 0
    y, stream = twin.rms_norm(**given, eps=EPS)
    (y.sum() + stream.sum()).backward()
    assert y[1].count_nonzero() == stream[1].count_nonzero() == 0
    assert all(x.grad.isfinite().all() for x in given.values())


def test_without_a_residual_the_stream_is_x_itself(twin, inputs):
    given = inputs(residual=False)
    assert twin.rms_norm(**given, eps=EPS)[1] is given["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_is_the_sum_in_the_dtype_of_the_residual(twin, inputs, dtype):
    given = inputs()
    x, residual = given["x"].bfloat16(), given["residual"].to(dtype)
    y, stream = twin.rms_norm(x, given["weight"], EPS, residual)
    assert torch.equal(stream, (x.float() + residual.float()).to(dtype))
    assert y.dtype == torch.bfloat16


def test_the_norm_is_of_the_sum_before_it_is_rounded(twin, inputs):
    # a BF16 residual swallows x: were h read back from it, y would not see x
    given = inputs(D=64)
    x, residual = 1e-3 * given["x"].detach(), given["residual"].detach().bfloat16()
    y, _ = twin.rms_norm(x, given["weight"].detach(), EPS, residual, dtype=torch.float32)
    whole, _ = twin.rms_norm(x + residual.float(), given["weight"].detach(), EPS)
    assert torch.equal(y, whole)


def test_bf16_is_rounded_only_once(twin, inputs):
    x, weight = (v.detach() for v in inputs(64, residual=False).values())
    x = x.bfloat16()
    exact, _ = twin.rms_norm(x.float(), weight, EPS)
    assert torch.equal(twin.rms_norm(x, weight, EPS)[0], exact.bfloat16())


def test_the_stream_passes_its_gradient_to_both_terms(twin, inputs):
    given = inputs()
    _, stream = twin.rms_norm(**given, eps=EPS)
    incoming = torch.randn_like(stream)
    stream.backward(incoming)
    assert torch.equal(given["x"].grad, incoming)
    assert torch.equal(given["residual"].grad, incoming)


def test_gradients_of_both_outputs_add_up(twin, inputs):
    given = inputs()

    def gradients(weights):
        outputs = twin.rms_norm(**given, eps=EPS)
        total = sum(w * out.square().sum() for w, out in zip(weights, outputs, strict=True) if w)
        return torch.autograd.grad(total, [given["x"], given["residual"]])

    def parts(x, residual):
        return tuple(a + b for a, b in zip(gradients((1, 0)), gradients((0, 2)), strict=True))

    def whole(x, residual):
        return gradients((1, 2))

    streams = {n: given[n].detach() for n in ("x", "residual")}
    assert_twins(whole, parts, streams, torch.float32)


def test_the_gradient_of_the_weight_is_fp32(twin, inputs):
    given = inputs()
    y, _ = twin.rms_norm(given["x"].bfloat16(), given["weight"], EPS)
    y.sum().backward()
    assert given["weight"].grad.dtype == torch.float32
    assert not torch.equal(given["weight"].grad, given["weight"].grad.bfloat16().float())
