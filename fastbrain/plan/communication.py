"""What the ranks of a step send to each other, how long it takes, and what of it computing hides.

A ring sends (W - 1) / W of a tensor for a gather, as much for a reduce-scatter, and twice that for
an all-reduce; every rank sends and receives at once. Messages are taken as long: their latency is
not counted. Sending costs the computing nothing.
"""

from dataclasses import dataclass
from typing import Literal

from fastbrain.config import TransformerConfig
from fastbrain.plan.groups import block_group, root_group
from fastbrain.plan.links import Link

Parallel = Literal["ddp", "fsdp"]

# a backward pass has twice the products of a forward pass
_FORWARD, _BACKWARD = 1 / 3, 2 / 3


@dataclass(frozen=True)
class Communication:
    """Of one rank in one step.

    Attributes:
        sent_bytes: to the next rank; as many come from the one before.
        ms: that this takes.
        exposed_ms: of them, what no computing hides, which makes the step longer.
    """

    sent_bytes: int
    ms: float
    exposed_ms: float

    @property
    def hidden_ms(self) -> float:
        """Of them, what goes on while the rank computes."""
        return self.ms - self.exposed_ms


def communication(
    config: TransformerConfig,
    parallel: Parallel,
    ranks: int,
    link: Link,
    micro_ms: float,
    accumulate: int = 1,
) -> Communication:
    """What a rank sends in a step, and how long it waits for it.

    Args:
        config: the model.
        parallel: how the ranks share it.
        ranks: 2 or more.
        link: between them.
        micro_ms: of computing a micro-batch, forward and backward.
        accumulate: micro-batches of a step.
    """
    if parallel == "ddp":
        return _all_reduced(config, ranks, link, micro_ms)
    return _gathered(config, ranks, link, micro_ms, accumulate)


def _all_reduced(
    config: TransformerConfig, ranks: int, link: Link, micro_ms: float
) -> Communication:
    """One all-reduce of the FP32 gradients a step.

    It begins in the last micro-batch's backward, which hides it but for the embedding's gradient,
    the last to come.
    """
    every, last = config.parameter_counts().total, config.vocab_size * config.d_model
    sent = 2 * (ranks - 1) * 4 * every // ranks
    ms = _ms(sent, link)
    tail = ms * last / every
    return Communication(sent, ms, tail + max(0.0, ms - tail - _BACKWARD * micro_ms))


def _gathered(
    config: TransformerConfig, ranks: int, link: Link, micro_ms: float, accumulate: int
) -> Communication:
    """Gathers of FP32 weights and a reduce-scatter of FP32 gradients in each micro-batch.

    The blocks are gathered twice, for forward and backward, and the rest once. Each block's gather
    hides behind the computing of the one before it, and its reduce-scatter behind backward; the
    first gather in either direction, the root's gather and its reduce-scatter have nothing to hide
    behind.
    """
    # what a rank sends to gather something, or to reduce-scatter it: its shard to every other
    blocks = [
        4 * (ranks - 1) * block_group(config, layer).shard(ranks)
        for layer in range(config.n_layers)
    ]
    root = 4 * (ranks - 1) * root_group(config).shard(ranks)
    sent = accumulate * (3 * sum(blocks) + 2 * root)
    forward = _ms(sum(blocks[1:]), link)
    backward = _ms(sum(blocks[:-1]) + sum(blocks), link)
    exposed = (
        _ms(blocks[0] + blocks[-1] + 2 * root, link)
        + max(0.0, forward - _FORWARD * micro_ms)
        + max(0.0, backward - _BACKWARD * micro_ms)
    )
    return Communication(sent, _ms(sent, link), accumulate * exposed)


def _ms(size: int, link: Link) -> float:
    return size / link.gb_per_s / 1e6
