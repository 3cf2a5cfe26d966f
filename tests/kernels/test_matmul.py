"""linear: FP32 masters multiplied through their BF16 shadow."""

from functools import partial

import pytest
import torch
from numerics import assert_twins, wide

from fastbrain.kernels import matmul, reference


def by_row(x, weight):
    """One product of a row with every output's weights."""
    rows = [(wide(weight) * row).sum(1) for row in wide(x).reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(*x.shape[:-1], len(weight)).to(x.dtype)


@pytest.fixture(params=[False, True], ids=["emulated", "fast"])
def bf16_unit(request, monkeypatch):
    """The CPU as one without, and as one with, BF16 instructions."""
    monkeypatch.setattr(matmul, "has_fast_bf16", lambda kind: request.param)


SHAPES = {"vector": (6,), "matrix": (5, 6), "batch": (2, 3, 6), "one-row": (1, 6)}


@pytest.mark.usefixtures("bf16_unit")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_are_multiplied_by_the_weight(randn, shape, dtype):
    assert_twins(reference.linear, by_row, {"x": randn(*shape), "weight": randn(4, 6)}, dtype)


@pytest.mark.usefixtures("bf16_unit")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shadow_is_multiplied_and_its_master_gets_the_gradient(randn, shape):
    weight = randn(4, 6)
    shadow = (3 * weight.detach()).bfloat16()  # unlike its master, to show which was used

    def definition(x, weight):
        return by_row(x, weight + (shadow.to(weight.dtype) - weight).detach())

    op = partial(reference.linear, shadow=shadow)
    inputs = {"x": randn(*shape), "weight": weight}
    assert_twins(op, definition, inputs, torch.bfloat16, fp32=["weight"])


# a CPU with BF16 instructions has no product of BF16 operands with a wider result
@pytest.mark.usefixtures("bf16_unit")
@pytest.mark.parametrize("bf16_unit", [False], indirect=True, ids=["emulated"])
def test_the_gradient_of_a_master_is_not_rounded_to_bf16(twin, randn):
    x, weight = randn(50, 6).bfloat16(), randn(4, 6)
    twin.linear(x, weight, weight.detach().bfloat16()).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_the_wanted_gradient_is_computed(randn, recorder, wanted):
    inputs = {"x": randn(5, 6).detach().bfloat16(), "weight": randn(4, 6).detach()}
    inputs[wanted].requires_grad_()
    out = reference.linear(**inputs, shadow=inputs["weight"].detach().bfloat16())
    with recorder as seen:
        out.sum().backward()
    assert inputs[wanted].grad.any()
    assert seen.operations.count("mm") == 1


def test_the_shadow_gets_no_gradient(twin, randn):
    shadow = randn(4, 6).detach().bfloat16().requires_grad_()
    twin.linear(randn(5, 6).bfloat16(), randn(4, 6), shadow).sum().backward()
    assert shadow.grad is None


@pytest.mark.usefixtures("bf16_unit")
@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
def test_a_product_is_rounded_once(device, given):
    # small whole numbers, of which every partial sum is exact in FP32 and few are in BF16
    a, b = (torch.randint(-64, 65, s, device=device) for s in ((9, 300), (300, 7)))
    exact = (a @ b).float().bfloat16()
    out = torch.empty(9, 7, dtype=torch.bfloat16, device=device) if given else None
    product = matmul.product(a.bfloat16(), b.bfloat16(), out=out)
    assert out is None or product is out
    assert torch.equal(product, exact)


@pytest.mark.usefixtures("bf16_unit")
@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up_in_fp32(device, operands):
    # each addend would vanish if the total were rounded to BF16
    total = torch.full((4, 6), 1024.0, device=device)
    dout, x = torch.ones(2, 4, device=device, dtype=operands), torch.ones(2, 6, device=device)
    for _ in range(3):
        matmul.weight_grad(dout, x.to(operands), total)
    assert torch.equal(total, torch.full_like(total, 1030.0))


@pytest.mark.usefixtures("bf16_unit")
@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 2])
def test_a_fresh_weight_gradient_overwrites_what_was_there(device, operands, rows):
    total = torch.full((4, 6), float("nan"), device=device)
    dout, x = torch.ones(rows, 4, device=device), torch.ones(rows, 6, device=device)
    matmul.weight_grad(dout.to(operands), x.to(operands), total, fresh=True)
    assert torch.equal(total, torch.full_like(total, float(rows)))
