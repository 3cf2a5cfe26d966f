"""What a table calls a model and a batch."""

import re

from fastbrain.config import TransformerConfig

# as `bench.shapes.TrainingShape` is written
_WRITTEN = re.compile(
    r"[^:]*: v(\d+) d(\d+) L(\d+), heads (\d+)/(\d+) x (\d+), d_ff (\d+)"
    r"(?:, MoE layers (\d+) to (\d+): (\d+) experts top (\d+), moe_d_ff (\d+)(, shared expert)?)?"
    r"; batch (\d+) x (\d+)"
)


def parse(text: str) -> tuple[TransformerConfig, int, int]:
    """The model, batch and sequence length of a written `bench.shapes.TrainingShape`.

    Raises:
        ValueError: it is not one.
    """
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not the shape of a training step")
    shared = match[13] is not None
    vocab, d_model, layers, heads, kv, head, d_ff = (int(match[n]) for n in range(1, 8))
    first, last, experts, top, moe_d_ff = (int(match[n] or 0) for n in range(8, 13))
    sizes = (vocab, d_model, layers, heads, kv, head, d_ff)
    config = TransformerConfig(*sizes, moe_layers=())
    if match[8] is not None:
        moe = tuple(range(first, last + 1))
        config = TransformerConfig(*sizes, moe_d_ff, experts, top, moe, shared)
    return config, int(match[14]), int(match[15])


def model(config: TransformerConfig) -> str:
    """Such as "dense 30.9M, v16384 d512 L8" or "MoE 55.2M/35.7M, v32000 d512 L8, 8 top 2"."""
    counts = config.parameter_counts()
    body = f"v{config.vocab_size} d{config.d_model} L{config.n_layers}"
    if not config.moe_layers:
        return f"dense {counts.total / 1e6:.1f}M, {body}"
    size = f"{counts.total / 1e6:.1f}M/{counts.active / 1e6:.1f}M"
    return f"MoE {size}, {body}, {config.num_experts} top {config.experts_per_token}"


def batch(sequences: int, seq: int) -> str:
    return f"{sequences} x {seq}"


def row(config: TransformerConfig) -> list[str]:
    """The cells of a table of shapes under `HEADER`."""
    c = config
    experts = "none"
    if c.moe_layers:
        experts = f"{c.num_experts} top {c.experts_per_token} of width {c.moe_d_ff}, layers "
        experts += f"{c.moe_layers[0]} to {c.moe_layers[-1]}"
        experts += ", one shared" if c.shared_expert else ""
    heads = f"{c.n_heads}/{c.n_kv_heads} x {c.head_dim}"
    sizes = [f"{c.vocab_size:,}", f"{c.d_model:,}", str(c.n_layers), heads, f"{c.d_ff:,}", experts]
    counts = c.parameter_counts()
    return [model(c), *sizes, f"{counts.total:,}", f"{counts.active:,}"]


HEADER = (
    "model", "vocabulary", "width", "layers", "heads", "d_ff", "experts", "parameters", "active",
)  # fmt: skip


def key(config: TransformerConfig) -> tuple[object, ...]:
    """What decides the cost of a step: equal for configurations that differ in nothing else."""
    c = config
    experts: tuple[object, ...] = ()
    if c.moe_layers:
        experts = (c.moe_layers, c.moe_d_ff, c.num_experts, c.experts_per_token, c.shared_expert)
    sizes = (c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff)
    return (*sizes, c.tie_embeddings, *experts)
