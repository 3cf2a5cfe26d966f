"""How fast a kind of operation goes on a card: one table, each figure with its source.

An operation takes the longer of its products at their share of the peak and its bytes at their
share of the bandwidth, and every launch adds a gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastbrain.plan.cards import Card
from fastbrain.plan.operations import Operation
from fastbrain.plan.shares import attention_share, expert_share


@dataclass(frozen=True)
class Rate:
    """Of a kind of operation; what its products reach is the card's or the simulation's to say.

    Attributes:
        bandwidth: of the nominal bandwidth.
        source: of the figures.
    """

    bandwidth: float
    source: str


_MEASURED = "measured on an RTX 3060 by the reference crate"

RATES = {
    "products": Rate(
        0.85,
        f"cuBLAS, 0.91 of the peak: 2,498 GFLOP in 108.0 ms of a step, {_MEASURED}",
    ),
    "kernels": Rate(0.90, "our attention and expert kernels: simulated from their machine code"),
    "stream": Rate(
        0.85, f"element-wise kernels, 70 to 91% of 360 GB/s, {_MEASURED}; ours are unmeasured"
    ),
    "loss": Rate(0.83, f"cross-entropy, 288 to 310 GB/s, {_MEASURED}"),
    "adam": Rate(0.88, f"Adam, 302 to 345 GB/s, mostly 318, {_MEASURED}"),
}
GAP_US = 5.3
GAP_SOURCE = f"190.4 ms of a step hold 185.6 ms of kernels, 906 of them, {_MEASURED}"
HOST_US = 12.0
HOST_SOURCE = "assumed: what PyTorch needs to start an operation from Python"

# on a CPU the reference twins run: of the rate of a measured product, and of a measured copy, from
# the profile of a dense step on two threads, in docs/baseline.md
CPU_ATTENTION, CPU_STREAM = 0.40, 0.35


@dataclass(frozen=True)
class Timed:
    """An operation and its predicted milliseconds; `limit` is "products" or "bytes"."""

    operation: Operation
    ms: float
    limit: str


def timed(operation: Operation, card: Card) -> Timed:
    """Predicts one operation, its launches' gaps left out."""
    rate = RATES[operation.rate]
    bandwidth = card.bytes_per_s * (CPU_STREAM if card.is_cpu else rate.bandwidth)
    by_bytes = operation.bytes / bandwidth
    by_flops = 0.0
    if operation.flops:
        peak = card.flops(operation.bf16)
        by_flops = operation.flops / (peak * product_share(operation, card))
    limit = "products" if by_flops > by_bytes else "bytes"
    return Timed(operation, 1e3 * max(by_flops, by_bytes), limit)


def product_share(operation: Operation, card: Card) -> float:
    """Of the card's peak that an operation's products reach."""
    if operation.share:
        return operation.share
    if not operation.kernel:
        return card.product_share
    if card.is_cpu:
        return CPU_ATTENTION if operation.head_dim else card.product_share
    if operation.head_dim:
        share = attention_share(
            operation.kernel, operation.bf16, operation.head_dim, int(operation.size)
        )
    else:
        share = expert_share(operation.kernel, operation.bf16, operation.size)
    return share * card.kernel_share


def step_ms(operations: Sequence[Timed], card: Card) -> float:
    """Of a whole step: its operations and gaps, or what the host needs to start them."""
    return max(_device_ms(operations, card), _host_ms(operations, card))


def host_bound(operations: Sequence[Timed], card: Card) -> bool:
    """Whether starting the operations takes longer than doing them."""
    return _host_ms(operations, card) > _device_ms(operations, card)


def _device_ms(operations: Sequence[Timed], card: Card) -> float:
    gap = 0.0 if card.is_cpu else GAP_US / 1e3
    return sum(each.ms + gap * each.operation.launches for each in operations)


def _host_ms(operations: Sequence[Timed], card: Card) -> float:
    # on a CPU the host is the device
    host = 0.0 if card.is_cpu else HOST_US / 1e3
    return sum(host * each.operation.launches for each in operations)
