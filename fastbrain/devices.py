"""CUDA devices: whether one will do, how much of it to take, and what to do when it is full."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastbrain.errors import Cuda, CudaMemoryBudget, InvalidConfig, UnsupportedCuda

REMEDIES = """\
In order, cheapest first:
  1. a smaller micro-batch, with more accumulation: the same gradient in less memory
  2. mixed precision, if it is off: set_mixed_precision(True)
  3. shorter sequences
  4. fewer key-value heads (another model: start over)
  5. more, narrower experts (another model: start over)
  6. fewer layers or a smaller d_model (another model: start over)"""


def claim_cuda(device: int, needed_bytes: int, budget_mib: int) -> None:
    """Refuses a device that cannot hold a model, then caps this process's share of it.

    Args:
        device: its index.
        needed_bytes: of weights, gradients and moments.
        budget_mib: MiB that this process may use there; 0 is no limit.

    Raises:
        UnsupportedCuda: there is no such device, or it is older than compute capability 8.0.
        CudaMemoryBudget: weights, gradients and moments alone exceed the budget.
    """
    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        raise UnsupportedCuda(
            f"there is no CUDA device {device} here; use the CPU, or check the driver and "
            "that PyTorch is a CUDA build"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise UnsupportedCuda(
            f"CUDA device {device} has compute capability {capability[0]}.{capability[1]}; the "
            "kernels need 8.0 (Ampere) or newer"
        )
    if budget_mib < 0:
        raise InvalidConfig(f"budget_mib must be at least 0, which is no limit; got {budget_mib}")
    estimate = math.ceil(needed_bytes / 2**20)
    if budget_mib and estimate > budget_mib:
        raise CudaMemoryBudget(estimate, budget_mib)
    if budget_mib:
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, budget_mib * 2**20 / total)
        torch.cuda.set_per_process_memory_fraction(share, device)


@contextmanager
def naming_remedies() -> Iterator[None]:
    """Turns running out of device memory into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Cuda(f"the device ran out of memory. {REMEDIES}\n({error})") from error
