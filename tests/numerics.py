"""One rule for every operation: about as close to the truth as PyTorch is in the same dtype.

Truth is a definition run in FP64 on the same rounded inputs and the same rounded incoming
gradients. The budget is twice the definition's own error in the working dtype, plus a fixed
fraction of the largest true value. It covers outputs and gradients, and no test has a tolerance of
its own.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

# allowed on top of the definition's own error, as a fraction of the largest true value
SLACK = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


class Found(NamedTuple):
    """What one run gave: outputs, and the gradient of every input that wants one."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def assert_twins(
    op: Callable,
    definition: Callable,
    inputs: dict[str, Tensor],
    dtype: torch.dtype,
    fp32: Collection[str] = (),
    scale: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Check every output and gradient of `op` against `definition` run in FP64.

    `fp32` names the inputs whose contract is FP32 whatever `dtype` is (gates, norm weights).
    `scale` gives the size to take the slack on where the truth is identically zero; gradients are
    named `d` and the input, outputs `out0`, `out1`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    inputs = {n: _cast(x, wide if n in fp32 else dtype) for n, x in inputs.items()}
    # in the working dtype first: its outputs say how the incoming gradients are rounded
    theirs, incoming = _run(definition, inputs, None)
    exact, _ = _run(definition, {n: _cast(x, torch.float64) for n, x in inputs.items()}, incoming)
    ours, _ = _run(op, inputs, incoming)
    for part in Found._fields:
        truth = getattr(exact, part)
        assert getattr(ours, part).keys() == truth.keys()
        for name, true_value in truth.items():
            assert_accurate(
                getattr(ours, part)[name],
                getattr(theirs, part)[name],
                true_value,
                dtype,
                scale.get(name, 0.0),
                name,
            )


def assert_accurate(
    ours: Tensor,
    theirs: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    size: float = 0.0,
    name: str = "result",
) -> None:
    """The rule itself: `theirs` is the definition in `dtype`, `exact` the definition in FP64."""
    assert ours.shape == exact.shape, f"{name}: shape {ours.shape}, not {exact.shape}"
    assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype}, not {theirs.dtype}"
    budget = 2 * _distance(theirs, exact) + SLACK[dtype] * max(_largest(exact), size)
    error = _distance(ours, exact)
    assert error <= budget, f"{name}: error {error:.2e} over budget {budget:.2e}"


def wide(x: Tensor) -> Tensor:
    """x in at least FP32, in which definitions compute; FP64 passes through."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _run(
    op: Callable, inputs: dict[str, Tensor], incoming: list[Tensor] | None
) -> tuple[Found, list[Tensor]]:
    args = {n: x.detach().requires_grad_(x.requires_grad) for n, x in inputs.items()}
    outputs = op(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [out for out in outputs if out.requires_grad]
    if incoming is None:
        seeded = torch.Generator(outputs[0].device).manual_seed(1)
        incoming = [
            torch.randn(out.shape, generator=seeded, device=out.device).to(out.dtype)
            for out in wanted
        ]
    gradients = [g.to(out.dtype) for g, out in zip(incoming, wanted, strict=True)]
    if wanted:
        torch.autograd.backward(wanted, gradients)
    return Found(
        {f"out{i}": out.detach() for i, out in enumerate(outputs)},
        {
            f"d{n}": torch.zeros_like(x) if x.grad is None else x.grad
            for n, x in args.items()
            if x.requires_grad
        },
    ), incoming


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.detach().to(dtype).requires_grad_(x.requires_grad)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _distance(a: Tensor, b: Tensor) -> float:
    return _largest(a.double() - b.double())
