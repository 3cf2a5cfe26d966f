"""Models for the parts that train, and text to train them on that has something to learn."""

import warnings
from collections.abc import Iterator

import torch

from fastbrain import Optimizer, TokenBatch, TransformerConfig, TransformerLm

_SMALL = {"n_layers": 4, "max_seq_len": 512}
_TOY = {
    "vocab_size": 32, "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16,
    "d_ff": 16, "moe_d_ff": 16, "num_experts": 2, "shared_expert": False, "max_seq_len": 16,
}  # fmt: skip


def configs(dry: bool) -> dict[str, TransformerConfig]:
    """A mixture of experts and a dense model."""
    fields = _TOY if dry else _SMALL
    first = 0 if dry else 2
    layers = tuple(range(first, fields["n_layers"]))
    return {
        "MoE": TransformerConfig(**fields, moe_layers=layers),
        "dense": TransformerConfig(**fields, moe_layers=()),
    }


def batch_shape(dry: bool) -> tuple[int, int]:
    """Sequences and tokens of each."""
    return (1, 12) if dry else (4, 512)


def model(
    config: TransformerConfig, dry: bool, mixed_precision: bool = True, seed: int = 1
) -> TransformerLm:
    """A new one with Adam at 1e-3, on the card unless dry."""
    with warnings.catch_warnings():
        # most CPUs are slower in mixed precision, and say so
        warnings.simplefilter("ignore")
        lm = TransformerLm(config, Optimizer.adam(1e-3), seed, mixed_precision)
    if not dry:
        lm.to_cuda()
    return lm


def batches(vocab_size: int, sequences: int, length: int, seed: int = 0) -> Iterator[TokenBatch]:
    """Endless batches in which a token leaves only 4 possibilities for the next."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(vocab_size, (sequences, length), generator=generator)
        choices = torch.randint(4, (sequences, length), generator=generator)
        for place in range(1, length):
            ids[:, place] = (7 * ids[:, place - 1] + 11 * choices[:, place]) % min(vocab_size, 500)
        yield TokenBatch(ids)
