"""Every block size and warp count in the package, by card family.

Chosen with the report (`python -m fastbrain.kernels.report`); docs/kernels.md shows what lost.
Every function takes the family first, "sm_80", "sm_86", "sm_89" or "sm_90", and returns the options
of one launch.
"""

from typing import Any

Tile = dict[str, Any]


def swiglu(family: str) -> Tile:
    """Elementwise over (N, F): 4 elements a thread make 128-bit accesses of FP32, 8 of BF16."""
    return {"BLOCK": 1024, "num_warps": 4}
