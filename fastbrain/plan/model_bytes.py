"""What the model itself takes on a rank at each moment of a step: weights, moments and gradients.

`Whole` is a single process, and each rank of data parallelism. `Sharded` is FSDP2 in FP32: a rank
keeps a shard of everything, and gathers what it computes with. The root group stays gathered from
its forward pass to the end of backward, which is when its gradient is cut up; of the blocks two are
gathered at a time. BF16 shadows live while what they are of is computed with. A block's gradient is
there in full until it is cut up, and the copy of it that is being sent until the block before has
its own.
"""

from fastbrain.config import TransformerConfig
from fastbrain.plan.groups import block_group, root_group, shard_parameters

GATHERED, UNSHARDED = "gathered weights", "unsharded gradients"


class Whole:
    """Everything is on every rank.

    Args:
        config: the model.
        bf16: whether operands have shadows.
        accumulating: whether gradients stay from one micro-batch to the next.
    """

    def __init__(self, config: TransformerConfig, bf16: bool, accumulating: bool) -> None:
        self._everything = 4 * config.parameter_counts().total
        self._before = self._everything if accumulating else 0
        self._table = 4 * config.vocab_size * config.d_model
        self._tied = config.tie_embeddings
        blocks = (block_group(config, layer) for layer in range(config.n_layers))
        # of the later layers, and of the head and its norm, at the end of each layer's backward
        self._from = _sums_from_the_end(
            [4 * block.parameters for block in blocks], self._table + 4 * config.d_model
        )
        self.fixed = {
            "weights": self._everything,
            "moments": 2 * self._everything,
            "shadow weights": 2 * shadowed(config) if bf16 else 0,
        }

    def loss(self) -> dict[str, int]:
        """When the logits are there."""
        return {"gradients": self._before}

    def backward(self, layer: int) -> dict[str, int]:
        """When backward is in a layer."""
        return {
            "gradients": self._before or self._from[layer],
            "head": self._table if self._before else 0,
        }

    def end(self) -> dict[str, int]:
        """When backward is in the embedding."""
        # the table's gradient from its rows, before it joins the head's
        tables = 2 if self._before and self._tied else 1
        return {"gradients": self._everything, "head": tables * self._table}

    def update(self) -> dict[str, int]:
        """When the weights change."""
        return {"gradients": self._everything}


class Sharded:
    """Everything is cut up over the ranks; see `Whole` for the rest."""

    def __init__(
        self, config: TransformerConfig, bf16: bool, accumulating: bool, shards: int
    ) -> None:
        root = root_group(config)
        self._blocks = [block_group(config, layer) for layer in range(config.n_layers)]
        self._shard = 4 * shard_parameters(config, shards)
        self._before = self._shard if accumulating else 0
        self._from = _sums_from_the_end([4 * block.shard(shards) for block in self._blocks], 0)
        self._shadow = 2 if bf16 else 0
        self._root = 4 * root.parameters
        self._head_shadow = self._shadow * root.operands
        # the head's gradient comes with the loss, that of the norm next
        self._root_so_far = 4 * config.d_model * (config.vocab_size + 1)
        self.fixed = {"weights": self._shard, "moments": 2 * self._shard, "shadow weights": 0}

    def loss(self) -> dict[str, int]:
        """When the logits are there; the buffer that the last block came in is, too."""
        buffer = 4 * self._blocks[-1].parameters
        return {"gradients": self._before, GATHERED: self._root + self._head_shadow + buffer}

    def backward(self, layer: int) -> dict[str, int]:
        """When backward is in a layer, and the next that it comes to is gathered already."""
        block = self._blocks[layer]
        gathered = self._root + 4 * block.parameters + self._shadow * block.operands
        if layer:
            gathered += 4 * self._blocks[layer - 1].parameters
        # that of the layer after, which is being sent
        later = self._blocks[layer + 1 : layer + 2]
        whole = self._root_so_far + sum(4 * each.parameters for each in (block, *later))
        reduced = self._from[layer + 1] if layer + 1 < len(self._blocks) else 0
        return {"gradients": self._before or reduced, GATHERED: gathered, UNSHARDED: whole}

    def end(self) -> dict[str, int]:
        """When the root's gradient is complete, and copied to be sent."""
        return {
            "gradients": self._shard,
            GATHERED: self._root,
            UNSHARDED: 2 * self._root,
        }

    def update(self) -> dict[str, int]:
        """When each rank changes its shard of the weights."""
        return {"gradients": self._shard}


def shadowed(config: TransformerConfig) -> int:
    """Parameters with a BF16 copy: all that are operands of products, the router apart."""
    D = config.d_model
    vectors = D * (2 * config.n_layers + 1)
    routers = D * config.num_experts * len(config.moe_layers)
    looked_up = 0 if config.tie_embeddings else D * config.vocab_size
    return config.parameter_counts().total - vectors - routers - looked_up


def _sums_from_the_end(sizes: list[int], start: int) -> list[int]:
    """The sum of each size and all that follow it, and of `start`."""
    sums = []
    for size in reversed(sizes):
        start += size
        sums.append(start)
    return sums[::-1]
