"""Small models and batches that the tests share."""

import torch

from fastbrain import Optimizer, TokenBatch, TransformerConfig, TransformerLm

DENSE = TransformerConfig(
    vocab_size=37,
    d_model=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    d_ff=32,
    moe_layers=(),
    max_seq_len=32,
)
MOE = TransformerConfig(
    vocab_size=37,
    d_model=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    d_ff=32,
    moe_d_ff=12,
    num_experts=4,
    experts_per_token=2,
    moe_layers=(1,),
    max_seq_len=32,
)
SHAPES = {"dense": DENSE, "moe": MOE}


def model(config: TransformerConfig, optimizer: Optimizer | None = None) -> TransformerLm:
    """A model with weights large enough that every part of it matters to the loss."""
    lm = TransformerLm(config, optimizer, seed=1)
    with torch.no_grad():
        lm.module.embedding.weight.mul_(20)
    return lm


def random_ids(*shape: int, vocab: int = 37, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, shape, generator=generator)


def batch(rows: int, length: int, seed: int = 0) -> TokenBatch:
    return TokenBatch(random_ids(rows, length, seed=seed))


def ragged(lengths: list[int], seed: int = 0) -> TokenBatch:
    return TokenBatch([random_ids(n, seed=seed + n) for n in lengths])
