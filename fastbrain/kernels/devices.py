"""What a device can do, asked once."""

from functools import cache

import torch


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there: CUDA devices that multiply BF16 in hardware."""
    return device.type == "cuda" and _capability(device.index or 0) >= (8, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def has_fast_bf16(device_type: str) -> bool:
    """Whether BF16 matrix products are faster than FP32 ones on this kind of device.

    On a CPU that takes the AVX512-BF16, AMX or ARM BF16 instructions; without them PyTorch
    emulates the products.
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.cpu._is_amx_tile_supported():
        return True
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
