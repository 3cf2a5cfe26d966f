"""The hot operations. Everything above this package imports from here and no deeper.

Each has two twins: `reference` says what it means in plain PyTorch, `fused` does it in Triton. A
tensor on a CUDA device of capability 8.0 or newer goes to `fused` and any other to `reference`, as
do FP64 and an attention head width that the kernels are not made for, unless `use` says otherwise.

Gradients have the dtype of their input, second derivatives are not offered, equal inputs give equal
bits, and a wrong shape or dtype is a `ValueError`. Shape letters are in `fastbrain.config`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from fastbrain.kernels import contracts, reference
from fastbrain.kernels.contracts import AdamScalars
from fastbrain.kernels.devices import has_fast_bf16, runs_kernels
from fastbrain.kernels.tiles import HEAD_WIDTHS

fused: ModuleType
if find_spec("triton"):
    from fastbrain.kernels import fused
else:  # there is no Triton wheel for this platform
    fused = reference

__all__ = [
    "AdamScalars",
    "adam_step",
    "causal_attention",
    "expert_ffn",
    "fused",
    "grad_norm",
    "grouped_matmul",
    "has_fast_bf16",
    "linear",
    "linear_cross_entropy",
    "masked_cross_entropy",
    "reference",
    "rms_norm",
    "rotary",
    "swiglu",
    "use",
]

_chosen: ModuleType | None = None


@contextmanager
def use(twin: ModuleType) -> Iterator[None]:
    """Send every call inside the block to one twin, `reference` or `fused`.

    It serves to bisect a bad loss, or to run the kernels on a CPU in Triton's interpreter: for that
    the environment variable TRITON_INTERPRET has to be 1 before fastbrain is imported.
    """
    global _chosen
    before, _chosen = _chosen, twin
    try:
        yield
    finally:
        _chosen = before


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, segments: Tensor | None = None
) -> Tensor:
    """Causal attention with grouped query heads: query head h reads key-value head h // (H / G).

    Args:
        q: (B, S, H, K), BF16 or FP32; the last axis contiguous, other strides free.
        k: (B, S, G, K), of q's dtype; G divides H.
        v: (B, S, G, K).
        scale: factor of the scores; K ** -0.5 unless given.
        segments: (B, S) int32, non-decreasing: a position sees only earlier positions of its own
            id, so that documents packed into one row do not see each other.

    Returns:
        (B, S, H, K), contiguous, in q's dtype.

    Raises:
        ValueError: shapes disagree, G does not divide H, or K is odd.
    """
    contracts.causal_attention(q, k, v, segments)
    twin = _twin(q) if _chosen or q.shape[3] in HEAD_WIDTHS else reference
    return twin.causal_attention(q, k, v, scale, segments)


def expert_ffn(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    shadows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Mixture of SwiGLU experts over routed tokens, dropping none.

    y_t = sum_j gates[t, j] * w_down[e] @ (silu(g) * u), (g, u) = w_gate_up[e] @ x_t,
    e = expert_ids[t, j].

    Args:
        x: (N, D), BF16 or FP32.
        w_gate_up: (E, 2F, D), gate rows first; of x's dtype, or FP32 with a shadow.
        w_down: (E, D, F), likewise.
        expert_ids: (N, k), int32 or int64; an id outside [0, E), such as -1 on padding, is
            skipped, and a repeated id counts twice.
        gates: (N, k), FP32.
        shadows: BF16 copies of the two weights, which are multiplied in their stead.

    Returns:
        (N, D) in x's dtype; a row with no expert is exactly 0.
    """
    contracts.expert_ffn(x, w_gate_up, w_down, expert_ids, gates, shadows)
    return _twin(x).expert_ffn(x, w_gate_up, w_down, expert_ids, gates, shadows)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, shadow: Tensor | None = None) -> Tensor:
    """Rows sorted by group, each times its group's weight: x_rows @ w[e].T.

    Args:
        x: (M, D), BF16 or FP32.
        w: (E, O, D), of x's dtype, or FP32 with a shadow.
        offsets: (E + 1), int32, non-decreasing from 0; group e is rows offsets[e] to
            offsets[e + 1].
        shadow: BF16 copy of w, which is multiplied in its stead.

    Returns:
        (M, O) in x's dtype; rows from offsets[E] on are 0 and get no gradient.
    """
    contracts.grouped_matmul(x, w, offsets, shadow)
    return _twin(x).grouped_matmul(x, w, offsets, shadow)


def linear(x: Tensor, weight: Tensor, shadow: Tensor | None = None) -> Tensor:
    """x @ weight.T, with the weight's gradient in the weight's dtype.

    Sums are FP32. A CPU with BF16 instructions rounds the gradient of a weight with a shadow to
    BF16 once, as all its products of BF16 operands: it has none with a wider result.

    Args:
        x: (..., D), BF16 or FP32.
        weight: (O, D), of x's dtype, or FP32 with a shadow.
        shadow: BF16 copy of the weight, which is multiplied in its stead.

    Returns:
        (..., O) in x's dtype.
    """
    contracts.linear(x, weight, shadow)
    return _twin(x).linear(x, weight, shadow)


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood summed over the rows that count, and their number.

    The mean is the caller's: `loss_sum / count.clamp(min=1)`.

    Args:
        logits: (N, V), BF16 or FP32.
        targets: (N), int64; never used where masked out. A target outside [0, V) that counts
            makes the sum NaN.
        mask: (N), bool: True where a row counts.

    Returns:
        loss_sum: 0-d FP32; 0 with zero gradients when no row counts.
        count: 0-d int64.
    """
    contracts.masked_cross_entropy(logits, targets, mask)
    return _twin(logits).masked_cross_entropy(logits, targets, mask)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    chunk: int = 2048,
    max_rows: int | None = None,
    shadow: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`masked_cross_entropy(hidden @ weight.T, targets, mask)`, never holding all the logits.

    In grad mode forward computes the gradients too; backward scales them in place by the upstream
    scalar, so that it runs only once.

    Args:
        hidden: (N, D), BF16 or FP32.
        weight: (V, D), of hidden's dtype, or FP32 with a shadow.
        targets: (N), int64.
        mask: (N), bool.
        chunk: rows whose logits are held at a time.
        max_rows: an upper bound, known to the host, on the rows that count; given it, masked rows
            cost nothing. More rows than it make the sum NaN.
        shadow: BF16 copy of the weight, which is multiplied in its stead.

    Returns:
        loss_sum: 0-d FP32.
        count: 0-d int64.
    """
    contracts.linear_cross_entropy(hidden, weight, targets, mask, chunk, max_rows, shadow)
    return _twin(hidden).linear_cross_entropy(
        hidden, weight, targets, mask, chunk, max_rows, shadow
    )


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    shadows: Sequence[Tensor],
    scalars: AdamScalars,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decays: Sequence[float],
) -> None:
    """One Adam update of all parameters, in place, with decoupled decay.

    With t = step + 1 and g = grad * grad_scale * clip (Kingma and Ba, 2015, arXiv 1412.6980;
    Loshchilov and Hutter, 2019, arXiv 1711.05101):

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p -= lr wd p
        p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps);  shadow = p in BF16;  step = t

    Args:
        params: FP32, contiguous.
        grads: FP32 or BF16, of its parameter's shape; an empty tensor is a gradient of 0, under
            which moments and decay still act.
        exp_avgs: first moments, FP32.
        exp_avg_sqs: second moments, FP32.
        shadows: BF16 copies to refresh, or empty tensors.
        scalars: see `AdamScalars`; with `skip` set nothing changes, not even the step.
        betas: decay rates of the moments.
        eps: added to the square root.
        weight_decays: one rate per parameter.
    """
    contracts.adam_step(params, grads, exp_avgs, exp_avg_sqs, shadows, scalars, weight_decays)
    _twin(scalars.step).adam_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        shadows,
        scalars,
        betas=betas,
        eps=eps,
        weight_decays=weight_decays,
    )


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all gradients together: 0-d FP32. Infinities and NaN pass through.

    Squares are FP32: elements beyond 1e19 give infinity, below 1e-23 they count as 0.
    """
    contracts.grad_norm(grads)
    return _twin(*grads[:1]).grad_norm(grads)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the residual stream after adding x to it.

    h = x + residual;  y = h / sqrt(mean(h^2) + eps) * weight.

    Args:
        x: (N, D), BF16 or FP32.
        weight: (D), FP32.
        eps: added to the mean square.
        residual: (N, D), BF16 or FP32; nothing is added when absent.
        dtype: of y; x's unless given.

    Returns:
        y: (N, D) in `dtype`.
        new_residual: h in residual's dtype; x itself without a residual. Where it is narrower than
            x, backward may start from the rounded h.
    """
    contracts.rms_norm(x, weight, residual, dtype)
    return _twin(x).rms_norm(x, weight, eps, residual, dtype)


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    offset: int = 0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of half-split pairs: channel j turns with channel j + K/2.

    lo' = lo cos - hi sin;  hi' = hi cos + lo sin (Su et al., 2021, arXiv 2104.09864).

    Args:
        q: (B, S, H, K), BF16 or FP32.
        k: (B, S, G, K).
        cos: (max_seq_len, K/2), FP32; row p belongs to position p.
        sin: (max_seq_len, K/2), FP32.
        offset: position of the first token; the others follow.
        positions: (B, S), int32 or int64, in place of offset + s. The caller keeps them below
            max_seq_len.

    Returns:
        The turned q and k, contiguous, in their dtypes.

    Raises:
        ValueError: K is odd, or offset + S exceeds max_seq_len.
    """
    contracts.rotary(q, k, cos, sin, offset, positions)
    return _twin(q).rotary(q, k, cos, sin, offset, positions)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half: (..., 2F) to (..., F), in the input's dtype."""
    contracts.swiglu(gate_up)
    return _twin(gate_up).swiglu(gate_up)


def _twin(*first: Tensor) -> ModuleType:
    """The implementation for calls whose first tensor this is."""
    if _chosen is None:
        return fused if any(_runs_fused(x) for x in first) else reference
    if _chosen is fused is not reference and any(x.dtype == torch.float64 for x in first):
        raise ValueError(
            "`fused` computes in FP32 and takes no float64; call outside of `use`, or in "
            "use(reference)"
        )
    return _chosen


def _runs_fused(x: Tensor) -> bool:
    return x.dtype != torch.float64 and runs_kernels(x.device)
