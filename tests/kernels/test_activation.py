"""swiglu: the first half of a row, through silu, times the second."""

import pytest
import torch
from numerics import assert_twins, wide
from torch.library import opcheck

from fastbrain import kernels
from fastbrain.kernels import activation, fused, reference


def by_half(gate_up):
    """silu written out."""
    F = gate_up.shape[-1] // 2
    gate, up = wide(gate_up)[..., :F], wide(gate_up)[..., F:]
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)


# widths below, at and above a block of 1024 columns, rows likewise, where a program has 16 of them
SHAPES = {
    "row": (6,),
    "matrix": (7, 10),
    "one-column": (5, 2),
    "one-row": (1, 128),
    "rows-15": (15, 128),
    "rows-16": (16, 128),
    "rows-17": (17, 128),
    "columns-1023": (2, 2046),
    "columns-1024": (2, 2048),
    "columns-1025": (2, 2050),
    "widest": (1, 22016),
    "batch": (2, 3, 8),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_first_half_gates_the_second(twin, randn, shape, dtype):
    assert_twins(twin.swiglu, by_half, {"gate_up": randn(*shape)}, dtype)


def test_gradients_are_the_slopes(randn):
    assert torch.autograd.gradcheck(
        reference.swiglu, randn(3, 4).detach().double().requires_grad_()
    )


def test_a_wide_range_of_gates_is_exact(twin, device):
    gates = torch.linspace(-30, 30, 121, device=device)
    gate_up = torch.stack([gates, torch.ones_like(gates)], dim=1).requires_grad_()
    assert_twins(twin.swiglu, by_half, {"gate_up": gate_up}, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_gates_stay_finite(twin, tensor, dtype):
    gate_up = tensor([[1e4, 2.0], [-1e4, 2.0], [0.0, 2.0]], dtype=dtype, requires_grad=True)
    y = twin.swiglu(gate_up)
    y.sum().backward()
    assert y.flatten().tolist() == tensor([2e4, 0, 0], dtype=dtype).tolist()
    assert gate_up.grad[:, 0].tolist() == [2.0, 0.0, 1.0]


def test_bf16_is_rounded_only_once(twin, device):
    gate_up = (3 * torch.randn(64, 32, device=device)).bfloat16()
    assert torch.equal(twin.swiglu(gate_up), twin.swiglu(gate_up.float()).bfloat16())


def test_columns_may_lie_apart(twin, device):
    wider = torch.full((4, 20), float("nan"), device=device)
    wider[:, 3:13] = torch.randn(4, 10, device=device)
    wider.requires_grad_()
    copy = wider.detach()[:, 3:13].clone().requires_grad_()
    ours, theirs = twin.swiglu(wider[:, 3:13]), twin.swiglu(copy)
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(ours, theirs)
    assert torch.equal(wider.grad[:, 3:13], copy.grad)


def test_rows_may_lie_past_2_to_the_31_elements(device, far):
    near = torch.randn(3, 40, device=device).bfloat16()
    found = []
    for gate_up in (near, far(near, 2**30)):
        leaf = gate_up.detach().requires_grad_()
        y = fused.swiglu(leaf)
        found.append([y, *torch.autograd.grad(y, leaf, torch.ones_like(y))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_equal_gradients_come_of_equal_calls(twin, randn):
    gate_up = randn(9, 70)
    seen = [torch.autograd.grad(twin.swiglu(gate_up).square().sum(), gate_up) for _ in range(5)]
    assert all(torch.equal(again[0], seen[0][0]) for again in seen)


def test_backward_keeps_the_input_alone(randn):
    gate_up = randn(4, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fused.swiglu(gate_up)
    assert [x.data_ptr() for x in kept] == [gate_up.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_the_rules_of_pytorch(randn, dtype):
    gate_up = randn(5, 8).detach().to(dtype).requires_grad_()
    opcheck(activation._fwd, (gate_up,))
    opcheck(activation._bwd, (gate_up.detach(), gate_up.detach()[:, :4].contiguous()))


def test_compiling_changes_nothing(randn):
    gate_up = randn(5, 8)

    def step(op):
        y = op(gate_up)
        return y, *torch.autograd.grad(y.square().sum(), gate_up)

    with kernels.use(fused):
        compiled = torch.compile(kernels.swiglu, fullgraph=True, backend="aot_eager")
        for ours, theirs in zip(step(compiled), step(kernels.swiglu), strict=True):
            assert torch.equal(ours, theirs)
