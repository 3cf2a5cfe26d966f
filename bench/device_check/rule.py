"""The tolerance rule of the tests, and equality of bits.

The rule lies beside the tests, which are no package, and needs torch alone.
"""

import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from bench.device_check.conduct import ROOT


def _numerics() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics", ROOT / "tests/numerics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


numerics = _numerics()

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; signs of zero and NaN count too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _INTEGERS[a.itemsize]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def repeatable() -> None:
    """Deterministic operations, and NaN in memory that nobody has written, as the tests have."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def release() -> None:
    """Gives memory back that PyTorch keeps, where there is a card."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
