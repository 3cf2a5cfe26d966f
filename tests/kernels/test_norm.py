"""rms_norm: the residual stream, what is added to it, and its scaled copy."""

from functools import partial

import pytest
import torch
from numerics import assert_accurate, assert_twins, wide
from torch.library import opcheck

from fastbrain import kernels
from fastbrain.kernels import fused, norm, reference

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


# widths below, at and above a block, and the widest; rows likewise, where a program has 16 of them,
# and more than the programs that share the gradient of the weight have at a time
SHAPES = [
    (1, 1), (3, 7), (1, 64), (15, 64), (16, 64), (17, 64),
    (3, 1023), (3, 1024), (3, 1025), (2, 8192), pytest.param(115, 520, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(("N", "D"), SHAPES, ids=str)
def test_rows_are_scaled_to_a_mean_square_of_one(twin, inputs, N, D, residual, dtype):
    op = partial(twin.rms_norm, eps=EPS)
    # of one column y is +-weight whatever x is: its gradient is all but 0
    scale = {"dx": 1.0, "dresidual": 1.0} if D == 1 else {}
    assert_twins(op, by_row, inputs(D, residual, N), dtype, fp32=["weight"], scale=scale)


@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=["x-fp32", "x-bf16"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["h-fp32", "h-bf16"])
@pytest.mark.parametrize(
    "out", [None, torch.float32, torch.bfloat16], ids=["y-x", "y-fp32", "y-bf16"]
)
def test_x_residual_and_output_have_their_own_dtypes(twin, inputs, x, stream, out):
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
    assert_twins(mixed(twin.rms_norm), truth, given, torch.bfloat16, fp32=list(given))


def test_gradients_are_the_slopes(inputs):
    given = [x.detach().double().requires_grad_() for x in inputs(D=4).values()]

    def op(x, weight, residual):
        return reference.rms_norm(x, weight, 1e-2, residual)

    assert torch.autograd.gradcheck(op, given)


def test_eps_is_added_to_the_mean_square(twin, inputs, dtype):
    given = inputs()
    with torch.no_grad():
        given["x"].mul_(0.1)
        given["residual"].mul_(0.1)
    op, definition = partial(twin.rms_norm, eps=0.5), partial(by_row, eps=0.5)
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
    whole = x + residual.float(), given["weight"].detach()
    theirs, exact = (by_row(*(t.to(kind) for t in whole))[0] for kind in (y.dtype, torch.float64))
    assert_accurate(y, theirs, exact, torch.float32)


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


def test_columns_beside_a_view_are_not_read(twin, device):
    wider = torch.full((5, 40), float("nan"), device=device)
    wider[:, 4:36] = torch.randn(5, 32, device=device)
    weight = torch.randn(32, device=device)
    copy = wider[:, 4:36].clone()
    for x, residual in ((wider[:, 4:36], None), (copy, wider[:, 4:36])):
        given = {"x": x, "weight": weight, "residual": residual}
        given = {n: v if v is None else v.detach().requires_grad_() for n, v in given.items()}
        y, stream = twin.rms_norm(**given, eps=EPS)
        (y.sum() + stream.sum()).backward()
        plain = {n: v if v is None else copy for n, v in given.items()} | {"weight": weight}
        assert torch.equal(y, twin.rms_norm(**plain, eps=EPS)[0])
        assert all(v is None or v.grad.isfinite().all() for v in given.values())


@pytest.mark.parametrize("names", [["x"], ["x", "residual"]], ids=["alone", "residual"])
def test_rows_may_lie_past_2_to_the_31_elements(device, far, names):
    near = {n: torch.randn(3, 40, device=device).bfloat16() for n in names}
    weight = torch.randn(40, device=device)
    found = []
    for given in (near, *(near | {n: far(near[n], 2**30)} for n in names)):
        leaves = {n: v.detach().requires_grad_() for n, v in given.items()}
        y, stream = fused.rms_norm(weight=weight, eps=EPS, **leaves)
        grads = torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))
        found.append([y, stream, *grads])
    for other in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, found[0], strict=True))


def test_either_output_alone_gives_its_gradients(twin, inputs):
    given = inputs(D=20)
    y, stream = twin.rms_norm(**given, eps=EPS)
    # the sum of two gradients is that of either alone where the other is 0
    for out, other in ((y, stream), (stream, y)):
        incoming = torch.randn_like(out)
        alone = torch.autograd.grad(
            [out], given.values(), [incoming], retain_graph=True, allow_unused=True
        )
        both = torch.autograd.grad(
            [out, other], given.values(), [incoming, torch.zeros_like(other)], retain_graph=True
        )
        for a, b in zip(alone, both, strict=True):
            assert torch.equal(torch.zeros_like(b) if a is None else a, b)


def test_the_gradient_of_the_weight_sums_all_rows_in_one_order(twin, device):
    # more rows than programs: terms of 1e8 that cancel show a lost row, and any change of order
    x = torch.randn(260, 16, device=device)
    x[::2] *= 1e4
    weight = torch.ones(16, device=device, requires_grad=True)
    incoming = torch.randn(260, 16, device=device) * 1e4
    seen = []
    for _ in range(5):
        y, _ = twin.rms_norm(x, weight, EPS)
        (grad,) = torch.autograd.grad([y], [weight], [incoming])
        seen.append(grad)
    assert all(torch.equal(seen[0], again) for again in seen)
    found = []
    for kind in (torch.float32, torch.float64):
        wanted = torch.ones(16, device=device, dtype=kind, requires_grad=True)
        y, _ = by_row(x.to(kind), wanted)
        found += torch.autograd.grad([y], [wanted], [incoming.to(kind)])
    assert_accurate(seen[0], *found, torch.float32)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_backward_keeps_the_stream_and_one_number_a_row(inputs, residual):
    given = inputs(24, residual, N=6)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _, stream = fused.rms_norm(**given, eps=EPS)
    assert [tuple(x.shape) for x in kept] == [(6, 24), (24,), (6,)]
    assert kept[0].data_ptr() == stream.data_ptr()


@pytest.mark.parametrize("stream", [None, torch.float32, torch.bfloat16])
def test_the_operators_keep_the_rules_of_pytorch(inputs, stream):
    given = inputs(12)
    x, weight = given["x"].detach().bfloat16().requires_grad_(), given["weight"]
    residual = None if stream is None else given["residual"].detach().to(stream).requires_grad_()
    opcheck(norm._fwd, (x, weight, EPS, residual, torch.float32))
    y, h, rstd = norm._fwd(x.detach(), weight.detach(), EPS, residual, torch.float32)
    h = x.detach() if residual is None else h.detach()
    dnew = None if residual is None else torch.randn_like(h)
    kinds = x.dtype, stream or x.dtype
    opcheck(norm._bwd, (torch.randn_like(y), dnew, h, weight.detach(), rstd.detach(), *kinds))


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_compiling_changes_nothing(inputs, residual):
    given = inputs(12, residual)

    def step(op):
        outputs = op(**given, eps=EPS)
        total = sum(out.square().sum() for out in outputs)
        return [*outputs, *torch.autograd.grad(total, list(given.values()))]

    with kernels.use(fused):
        compiled = torch.compile(kernels.rms_norm, fullgraph=True, backend="aot_eager")
        for ours, theirs in zip(step(compiled), step(kernels.rms_norm), strict=True):
            assert torch.equal(ours, theirs)
