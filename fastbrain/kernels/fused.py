"""The Triton twins: the names and signatures of `reference`, done fast."""

from fastbrain.kernels.activation import swiglu
from fastbrain.kernels.adam import adam_step, grad_norm
from fastbrain.kernels.attention import causal_attention
from fastbrain.kernels.chunked_head import linear_cross_entropy
from fastbrain.kernels.contracts import AdamScalars
from fastbrain.kernels.cross_entropy import masked_cross_entropy
from fastbrain.kernels.grouped_gemm import expert_ffn, grouped_matmul
from fastbrain.kernels.matmul import linear
from fastbrain.kernels.norm import rms_norm
from fastbrain.kernels.rope import rotary

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
