"""What callers must give each operation, checked from metadata alone: nothing waits for a device.

Every refusal is a `ValueError` that names the argument, what it is and the rule.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


class AdamScalars(NamedTuple):
    """What changes from step to step, as 0-d tensors on the device of the parameters.

    Attributes:
        lr: FP32 learning rate.
        grad_scale: FP32 factor of every gradient, such as 1 / accumulation.
        clip: FP32 factor of every gradient, 1 where nothing is clipped.
        step: int64 count of updates so far; `adam_step` advances it.
        skip: int32; other than 0, the call changes nothing at all.
    """

    lr: Tensor
    grad_scale: Tensor
    clip: Tensor
    step: Tensor
    skip: Tensor


_SCALARS = {
    "lr": (torch.float32, torch.float64),
    "grad_scale": (torch.float32, torch.float64),
    "clip": (torch.float32, torch.float64),
    "step": (torch.int64,),
    "skip": (torch.int32,),
}


def causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> None:
    _floats(q=q)
    _dtype("k", k, (q.dtype,))
    _dtype("v", v, (q.dtype,))
    _ranks(4, q=q, k=k, v=v)
    B, S, H, K = q.shape
    G = k.shape[2]
    _shape("k", k, (B, S, G, K), "must have q's batch, length and head width")
    _shape("v", v, (B, S, G, K), "must have k's shape")
    if G == 0 or H % G:
        raise ValueError(f"query heads must be a multiple of key-value heads, got {H} and {G}")
    _even_width(K)
    if segments is not None:
        _shape("segments", segments, (B, S), "must name the document of every position")
        _dtype("segments", segments, (torch.int32,))


def expert_ffn(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    shadows: tuple[Tensor, Tensor] | None,
) -> None:
    _ranks(2, x=x, expert_ids=expert_ids, gates=gates)
    _ranks(3, w_gate_up=w_gate_up, w_down=w_down)
    N, D = x.shape
    E, F2, _ = w_gate_up.shape
    if F2 % 2:
        raise ValueError(f"w_gate_up must hold gate and up rows, an even number, got {F2}")
    _shape("w_gate_up", w_gate_up, (E, F2, D), "must take rows of x's width")
    _shape("w_down", w_down, (E, D, F2 // 2), "must map the hidden width back to x's")
    _shape("expert_ids", expert_ids, (N, expert_ids.shape[1]), "must have a row per row of x")
    _shape("gates", gates, tuple(expert_ids.shape), "must have the shape of expert_ids")
    if expert_ids.shape[1] == 0:
        raise ValueError(f"expert_ids must name at least 1 expert per row, got shape ({N}, 0)")
    _dtype("expert_ids", expert_ids, INTEGERS)
    _dtype("gates", gates, (torch.float32, torch.float64))
    _weight("w_gate_up", w_gate_up, x, shadows and shadows[0])
    _weight("w_down", w_down, x, shadows and shadows[1])


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, shadow: Tensor | None) -> None:
    _ranks(2, x=x)
    _ranks(3, w=w)
    E, outputs, _ = w.shape
    _shape("w", w, (E, outputs, x.shape[1]), "must take rows of x's width")
    _shape("offsets", offsets, (E + 1,), "must bound every group")
    _dtype("offsets", offsets, (torch.int32,))
    _weight("w", w, x, shadow)


def linear(x: Tensor, weight: Tensor, shadow: Tensor | None, x_name: str = "x") -> None:
    if x.dim() == 0:
        raise ValueError(f"{x_name} must have at least 1 dimension, got shape ()")
    _floats(**{x_name: x})
    _ranks(2, weight=weight)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must take rows of {x_name}'s width {x.shape[-1]}, "
            f"got shape {tuple(weight.shape)}"
        )
    _weight("weight", weight, x, shadow)


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> None:
    _floats(logits=logits)
    _ranks(2, logits=logits)
    _vocabulary("logits", logits, logits.shape[1])
    _targets(logits.shape[0], targets, mask)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    chunk: int,
    max_rows: int | None,
    shadow: Tensor | None,
) -> None:
    _ranks(2, hidden=hidden)
    linear(hidden, weight, shadow, "hidden")
    _vocabulary("weight", weight, weight.shape[0])
    _targets(hidden.shape[0], targets, mask)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}")
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"max_rows must not be negative, got {max_rows}")


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    shadows: Sequence[Tensor],
    scalars: AdamScalars,
    weight_decays: Sequence[float],
) -> None:
    for name, scalar in scalars._asdict().items():
        _ranks(0, **{name: scalar})
        _dtype(name, scalar, _SCALARS[name])
    lists = {
        "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs,
        "shadows": shadows, "weight_decays": weight_decays,
    }  # fmt: skip
    for name, values in lists.items():
        if len(values) != len(params):
            raise ValueError(
                f"{name} must have one entry per parameter: {len(params)}, got {len(values)}"
            )
    for i, (p, g, m, v, s) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, shadows, strict=True)
    ):
        _dtype(f"params[{i}]", p, (torch.float32, torch.float64))
        for name, moment in (("exp_avgs", m), ("exp_avg_sqs", v)):
            _shape(f"{name}[{i}]", moment, tuple(p.shape), "must have its parameter's shape")
            _dtype(f"{name}[{i}]", moment, (p.dtype,))
        for name, optional, dtypes in (("grads", g, FLOATS), ("shadows", s, (torch.bfloat16,))):
            if optional.numel():
                _shape(f"{name}[{i}]", optional, tuple(p.shape), "must have its parameter's shape")
                _dtype(f"{name}[{i}]", optional, dtypes)
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "shadows")
        for name, tensor in zip(names, (p, g, m, v, s), strict=True):
            if not tensor.is_contiguous():
                raise ValueError(f"{name}[{i}] must be contiguous, got strides {tensor.stride()}")


def grad_norm(grads: Sequence[Tensor]) -> None:
    for i, grad in enumerate(grads):
        _dtype(f"grads[{i}]", grad, FLOATS)


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None, dtype: torch.dtype | None) -> None:
    _floats(x=x)
    _ranks(2, x=x)
    _shape("weight", weight, (x.shape[1],), "must have one entry per column of x")
    _dtype("weight", weight, (torch.float32, torch.float64))
    if residual is not None:
        _shape("residual", residual, tuple(x.shape), "must have x's shape")
        _dtype("residual", residual, FLOATS)
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {_names(FLOATS)}, got {dtype}")


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, offset: int, positions: Tensor | None
) -> None:
    _floats(q=q, k=k)
    _ranks(4, q=q, k=k)
    B, S, _, K = q.shape
    _shape("k", k, (B, S, k.shape[2], K), "must have q's batch, length and head width")
    _even_width(K)
    _ranks(2, cos=cos)
    _dtype("cos", cos, (torch.float32, torch.float64))
    _dtype("sin", sin, (cos.dtype,))
    _shape("cos", cos, (cos.shape[0], K // 2), "must have one column per pair of channels")
    _shape("sin", sin, tuple(cos.shape), "must have cos's shape")
    if positions is not None:
        _shape("positions", positions, (B, S), "must place every token")
        _dtype("positions", positions, INTEGERS)
    elif offset < 0 or offset + S > cos.shape[0]:
        raise ValueError(
            f"offset + length must lie in 0 to {cos.shape[0]}, the rows of cos, got {offset} + {S}"
        )


def swiglu(gate_up: Tensor) -> None:
    _floats(gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"gate_up must hold gate and up halves, an even width, got shape {tuple(gate_up.shape)}"
        )


def _vocabulary(name: str, x: Tensor, size: int) -> None:
    if size == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1, got shape {tuple(x.shape)}")


def _targets(rows: int, targets: Tensor, mask: Tensor) -> None:
    _shape("targets", targets, (rows,), "must have one entry per row")
    _shape("mask", mask, (rows,), "must have one entry per row")
    _dtype("targets", targets, (torch.int64,))
    _dtype("mask", mask, (torch.bool,))


def _weight(name: str, weight: Tensor, x: Tensor, shadow: Tensor | None) -> None:
    _floats(x=x)
    if shadow is None:
        _dtype(name, weight, (x.dtype,))
        return
    _dtype(name, weight, (torch.float32, torch.float64))
    _shape(f"{name}'s shadow", shadow, tuple(weight.shape), "must have its master's shape")
    _dtype(f"{name}'s shadow", shadow, (x.dtype,))


def _even_width(width: int) -> None:
    if width % 2:
        raise ValueError(f"head width must be even, got {width}")


def _floats(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        _dtype(name, tensor, FLOATS)


def _ranks(rank: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(tensor.shape)}")


def _shape(name: str, tensor: Tensor, shape: tuple[int, ...], rule: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} {rule}: {shape}, got {tuple(tensor.shape)}")


def _dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be {_names(allowed)}, got {tensor.dtype}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
