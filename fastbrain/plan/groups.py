"""A model's parameters in the groups that ranks gather together, and what one rank keeps of them.

A block is a group; the root group is the embedding, the last norm and an untied head. Tensors are
cut along their first dimension, as PyTorch's FSDP2 cuts them: into pieces of equally many rows,
the last ones shorter or empty. Letters are in `fastbrain.config`.
"""

import math
from dataclasses import dataclass

from fastbrain.config import TransformerConfig


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together.

    Attributes:
        shapes: of its tensors.
        operands: parameters of it that are operands of products, which take a BF16 copy.
    """

    shapes: tuple[tuple[int, ...], ...]
    operands: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def shard(self, ranks: int) -> int:
        """Parameters on the rank that keeps the most of it."""
        return sum(-(-rows // ranks) * math.prod(row) for rows, *row in self.shapes)


def block_group(config: TransformerConfig, layer: int) -> Group:
    """A block's."""
    D, K = config.d_model, config.head_dim
    heads = config.n_heads * K
    operands: tuple[tuple[int, ...], ...] = (heads + 2 * config.n_kv_heads * K, D), (D, heads)
    others: tuple[tuple[int, ...], ...] = (D,), (D,)
    if config.is_moe(layer):
        E, F = config.num_experts, config.moe_d_ff
        others += ((E, D),)
        operands += (E, 2 * F, D), (E, D, F)
        operands += _feed_forward(D, F) if config.shared_expert else ()
    else:
        operands += _feed_forward(D, config.d_ff)
    return Group(others + operands, sum(math.prod(shape) for shape in operands))


def root_group(config: TransformerConfig) -> Group:
    """All that is in no block."""
    table = (config.vocab_size, config.d_model)
    tables = (table,) if config.tie_embeddings else (table, table)
    return Group((*tables, (config.d_model,)), math.prod(table))


def shard_parameters(config: TransformerConfig, ranks: int) -> int:
    """Parameters of all groups on the rank that keeps the most."""
    blocks = sum(block_group(config, layer).shard(ranks) for layer in range(config.n_layers))
    return blocks + root_group(config).shard(ranks)


def _feed_forward(D: int, F: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * F, D), (D, F)
