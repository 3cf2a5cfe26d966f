"""fastbrain trains small language models for days on one consumer GPU.

The names below are the public interface. Each is imported when it is first used, so that
`fastbrain --help` does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastbrain import kernels
    from fastbrain.config import (
        LinearScaling,
        Llama3Scaling,
        LoraConfig,
        ParameterCounts,
        TransformerConfig,
    )
    from fastbrain.errors import (
        Cuda,
        CudaMemoryBudget,
        EmptyDataset,
        FastBrainError,
        InvalidConfig,
        InvalidDataset,
        InvalidSnapshot,
        Io,
        SequenceTooLong,
        Serde,
        TokenOutOfRange,
        UnsupportedCuda,
    )
    from fastbrain.generate import Decoder
    from fastbrain.lm import TransformerLm
    from fastbrain.losses import TotalLoss
    from fastbrain.optim import Optimizer
    from fastbrain.parallel.ranks import RankLost, Ranks
    from fastbrain.precision import Precision
    from fastbrain.sampler import Sampler
    from fastbrain.schedule import Schedule
    from fastbrain.tokens import TokenBatch, TokenFile

_HOME = {
    "Cuda": "errors",
    "CudaMemoryBudget": "errors",
    "Decoder": "generate",
    "EmptyDataset": "errors",
    "FastBrainError": "errors",
    "InvalidConfig": "errors",
    "InvalidDataset": "errors",
    "InvalidSnapshot": "errors",
    "Io": "errors",
    "LinearScaling": "config",
    "Llama3Scaling": "config",
    "LoraConfig": "config",
    "Optimizer": "optim",
    "ParameterCounts": "config",
    "Precision": "precision",
    "RankLost": "parallel.ranks",
    "Ranks": "parallel.ranks",
    "Sampler": "sampler",
    "Schedule": "schedule",
    "SequenceTooLong": "errors",
    "Serde": "errors",
    "TokenBatch": "tokens",
    "TokenFile": "tokens",
    "TokenOutOfRange": "errors",
    "TotalLoss": "losses",
    "TransformerConfig": "config",
    "TransformerLm": "lm",
    "UnsupportedCuda": "errors",
}

__all__ = [
    "Cuda",
    "CudaMemoryBudget",
    "Decoder",
    "EmptyDataset",
    "FastBrainError",
    "InvalidConfig",
    "InvalidDataset",
    "InvalidSnapshot",
    "Io",
    "LinearScaling",
    "Llama3Scaling",
    "LoraConfig",
    "Optimizer",
    "ParameterCounts",
    "Precision",
    "RankLost",
    "Ranks",
    "Sampler",
    "Schedule",
    "SequenceTooLong",
    "Serde",
    "TokenBatch",
    "TokenFile",
    "TokenOutOfRange",
    "TotalLoss",
    "TransformerConfig",
    "TransformerLm",
    "UnsupportedCuda",
    "kernels",
]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return import_module("fastbrain.kernels")
    if name not in _HOME:
        raise AttributeError(f"module 'fastbrain' has no attribute {name!r}")
    return getattr(import_module(f"fastbrain.{_HOME[name]}"), name)
