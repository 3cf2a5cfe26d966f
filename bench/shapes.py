"""The shapes that benchmarks run at, as data, so that ours and the peer read the same numbers.

`TRAINING` is what tables quote of a CPU, and `CARD` of a GPU. `TOY` is the same in miniature: it
keeps the benchmarks from rotting and is never quoted, because at that size the time is Python's.
"""

from dataclasses import dataclass, replace

from fastbrain.config import TransformerConfig

LEARNING_RATE = 3e-4
MAX_NORM = 1.0  # of the gradient, on both sides


@dataclass(frozen=True)
class TrainingShape:
    """A model and the batch it is trained with.

    Attributes:
        name: "dense" or "moe".
        config: the model.
        batch: sequences in a batch.
        seq_len: tokens in a sequence.
    """

    name: str
    config: TransformerConfig
    batch: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens in a batch, the ones without a target included."""
        return self.batch * self.seq_len

    def __str__(self) -> str:
        c = self.config
        text = (
            f"{self.name}: v{c.vocab_size} d{c.d_model} L{c.n_layers}, heads "
            f"{c.n_heads}/{c.n_kv_heads} x {c.head_dim}, d_ff {c.d_ff}"
        )
        if c.moe_layers:
            text += (
                f", MoE layers {c.moe_layers[0]} to {c.moe_layers[-1]}: {c.num_experts} experts "
                f"top {c.experts_per_token}, moe_d_ff {c.moe_d_ff}"
            )
            text += ", shared expert" if c.shared_expert else ""
        return f"{text}; batch {self.batch} x {self.seq_len}"


TRAINING = {
    "dense": TrainingShape("dense", TransformerConfig(vocab_size=16_384, moe_layers=()), 4, 512),
    "moe": TrainingShape("moe", TransformerConfig(vocab_size=16_384), 4, 512),
}

CARD = {
    "dense": TrainingShape(
        "dense",
        TransformerConfig(
            vocab_size=32_004,
            d_model=768,
            n_layers=16,
            n_heads=12,
            n_kv_heads=4,
            d_ff=1408,
            moe_layers=(),
            max_seq_len=1024,
        ),
        8,
        1024,
    ),
    "moe": TrainingShape(
        "moe",
        TransformerConfig(
            d_model=1024,
            n_layers=20,
            n_heads=16,
            n_kv_heads=4,
            d_ff=2816,
            moe_d_ff=512,
            moe_layers=tuple(range(5, 20)),
            max_seq_len=1024,
        ),
        8,
        1024,
    ),
}

_TOY = TransformerConfig(
    vocab_size=512,
    d_model=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=176,
    moe_d_ff=48,
    num_experts=4,
    moe_layers=(1, 2),
)
TOY = {
    "dense": TrainingShape("dense", replace(_TOY, moe_layers=()), 2, 64),
    "moe": TrainingShape("moe", _TOY, 2, 64),
}
