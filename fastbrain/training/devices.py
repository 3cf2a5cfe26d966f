"""The device a run trains on: what it has, what it can hold, and how many rows fit at once."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastbrain.config import TransformerConfig
from fastbrain.errors import Cuda, CudaMemoryBudget, InvalidConfig
from fastbrain.lm import TransformerLm
from fastbrain.parallel.ranks import Ranks
from fastbrain.plan.machine import machine_bytes
from fastbrain.tokens.token_batch import TokenBatch
from fastbrain.training.space import require_space
from fastbrain.transformer import split_parameters

if sys.platform != "win32":
    import resource

# weights, gradients and two moments, each 4 bytes; a checkpoint has no gradients
BYTES_PER_PARAMETER, CHECKPOINT_BYTES = 16, 12

# more tokens than these at once make no step faster: their matrices fill the device
CPU_TOKENS, CUDA_TOKENS = 4_096, 65_536
# of a card's memory; evaluation, fragmentation and the desktop want some of it too
CUDA_SHARE = 0.92


@dataclass(frozen=True)
class Device:
    """One device; `total_bytes` is the memory of a card, None for a CPU."""

    torch_device: torch.device
    name: str
    total_bytes: int | None

    @classmethod
    def find(cls, ranks: Ranks | None = None) -> "Device":
        """The device of this rank; alone, the first CUDA card if there is one, else the CPU."""
        found = (ranks or Ranks.alone()).device
        if found.type == "cuda":
            properties = torch.cuda.get_device_properties(found)
            return cls(found, properties.name, properties.total_memory)
        return cls(found, "CPU", None)

    @property
    def is_cuda(self) -> bool:
        """Whether it is a card."""
        return self.torch_device.type == "cuda"

    def peak_bytes(self) -> int:
        """The most memory this process has used: on the card, or of the machine."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        if sys.platform == "win32":
            return 0  # there is no such call
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Fetched:
    """Numbers on their way from the device to the host; asking for them waits until they are."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def values(self) -> list[float]:
        """The numbers, as Python's own."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._host.tolist()
        return found


def check_space(
    config: TransformerConfig,
    device: Device,
    run: Path,
    processes: int = 1,
    shards: int = 1,
) -> None:
    """Refuse a model that cannot fit in memory, or whose checkpoints cannot fit on the disk.

    Args:
        config: the model.
        device: of this rank.
        run: the run's directory.
        processes: of the run on this machine.
        shards: parts that the model is divided into.

    Raises:
        InvalidConfig: the machine has less memory than weights, gradients and moments need.
        Io: the disk has less free space than two checkpoints need.
    """
    trained, frozen = split_parameters(config)
    need, parts = trained * BYTES_PER_PARAMETER + frozen * 4, "weights, gradients and moments"
    need //= shards
    if not device.is_cuda and processes > 1:
        need, parts = need * processes, f"{parts} of {processes} processes"
    saved = trained * CHECKPOINT_BYTES + frozen * 4
    if not device.is_cuda:
        # what a checkpoint is written from lies in the same memory
        need, parts = need + saved, f"{parts} and their copy for saving"
    have = device.total_bytes or machine_bytes()
    if have and need > have:
        raise InvalidConfig(
            f"a model of {trained + frozen:,} parameters needs {need / 1e9:.1f} GB for {parts}; "
            f"this machine has {have / 1e9:.1f} GB: build a smaller one"
        )
    require_space(run, 2 * saved, "two checkpoints need")


def micro_batch_size(model: TransformerLm, device: Device, rows: int, seq_len: int) -> int:
    """How many rows to run at once: the largest divisor of `rows` that is useful and fits.

    On a card it is tried, and leaves the model as it was.

    Raises:
        Cuda: not even one row fits.
    """
    most = (CUDA_TOKENS if device.is_cuda else CPU_TOKENS) // seq_len
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0 and size <= max(most, 1)]
    if not device.is_cuda:
        return sizes[0]
    model.moments()  # they appear when first asked for, and have to fit as well
    for size in sizes:
        if _fits(model, device, size, seq_len):
            return size
    raise Cuda(
        f"not even one row of {seq_len} tokens fits into {device.name}: lower data.seq_len, or "
        "build a smaller model"
    )


def _fits(model: TransformerLm, device: Device, rows: int, seq_len: int) -> bool:
    # spread over the vocabulary, so that no expert or row of the embedding is spared
    ids = torch.arange(rows * seq_len).reshape(rows, seq_len) % model.config.vocab_size
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    try:
        # twice: the second one meets the gradients of the first, as in an accumulated step
        for _ in range(2):
            model.accumulate_step(TokenBatch(ids), weight=0.5)
        torch.cuda.synchronize(device.torch_device)
        used = torch.cuda.max_memory_reserved(device.torch_device)
        return used <= CUDA_SHARE * (device.total_bytes or 0)
    except (torch.cuda.OutOfMemoryError, CudaMemoryBudget, Cuda):
        return False
    finally:
        model.zero_grad()
        torch.cuda.empty_cache()
