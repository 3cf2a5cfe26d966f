"""What every test starts from: one seed, deterministic operations, and NaN in unwritten memory."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so before any test imports one
    os.environ.setdefault("TRITON_INTERPRET", "1")

# without a workspace of its own cuBLAS sums in any order; it reads this at its first product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# the tests' tensors are too small to share, and threads that wait for each other take far longer
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _repeatable():
    """A warning is an error here, so an operation without a deterministic form fails its test.

    Deterministic mode also fills `torch.empty` with NaN: an output left unwritten shows itself.
    """
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device():
    """The fastest device of this machine."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
