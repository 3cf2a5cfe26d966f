"""The Triton twins: the names and signatures of `reference`, done fast."""

from fastbrain.kernels.activation import swiglu
from fastbrain.kernels.contracts import AdamScalars
from fastbrain.kernels.matmul import linear
from fastbrain.kernels.reference import (
    adam_step,
    causal_attention,
    expert_ffn,
    grad_norm,
    grouped_matmul,
    linear_cross_entropy,
    masked_cross_entropy,
    rms_norm,
    rotary,
)

__all__ = [
    "AdamScalars",
    "adam_step",
    "causal_attention",
    "expert_ffn",
    "grad_norm",
    "grouped_matmul",
    "linear",
    "linear_cross_entropy",
    "masked_cross_entropy",
    "rms_norm",
    "rotary",
    "swiglu",
]
