"""Every hot operation at the shapes of the chapter's model, with the peers a user would pick."""

from collections.abc import Iterator

import torch

from bench.operations import attention, experts, head, optimizer, pointwise
from bench.operations.case import CHAPTER, OURS, TOY, Build, Case, Sizes

__all__ = ["CHAPTER", "OPERATIONS", "OURS", "TOY", "Build", "Case", "Sizes", "cases"]

OPERATIONS: dict[str, Build] = {
    "attention": attention.attention,
    "experts": experts.expert_ffn,
    "grouped_matmul": experts.grouped_matmul,
    "linear_cross_entropy": head.linear_cross_entropy,
    "masked_cross_entropy": head.masked_cross_entropy,
    "adam": optimizer.adam,
    "grad_norm": optimizer.grad_norm,
    "rms_norm": pointwise.rms_norm,
    "rotary": pointwise.rotary,
    "swiglu": pointwise.swiglu,
}


def cases(sizes: Sizes, device: torch.device, peers: bool = True) -> Iterator[Case]:
    """All cases, one at a time, so that only one holds memory."""
    torch.manual_seed(0)
    for build in OPERATIONS.values():
        for case in build(sizes, device):
            if not peers:
                case.contenders = {n: c for n, c in case.contenders.items() if n in OURS}
            yield case
