"""What a step keeps between forward and backward, to the byte: the formula of docs/kernels.md.

Every storage counts once; weights, their shadows and the rotary tables are not counted. Both twins
are covered: `fused` runs on CUDA, `reference` on the CPU. Rows are taken without padding. Letters
are in `fastbrain.config`; a is the bytes of an activation.
"""

from fastbrain.config import TransformerConfig

# rows of a tile of the routing map, in all families but sm_90 under BF16
_TILE_ROWS = 64


def saved_bytes(
    config: TransformerConfig, batch: int, seq: int, bf16: bool, fused: bool = True
) -> int:
    """All of it for one micro-batch: layers, last norm, and the head's ready-made gradients."""
    N = batch * seq
    return (
        sum(layer_bytes(config, layer, N, bf16, fused) for layer in range(config.n_layers))
        + last_norm_bytes(config, N)
        + head_bytes(config, N, bf16, fused)
    )


def layer_bytes(
    config: TransformerConfig, layer: int, N: int, bf16: bool, fused: bool = True
) -> int:
    """One layer's."""
    a = 2 if bf16 else 4
    heads = config.n_heads + config.n_kv_heads
    # two norms, their outputs, projections, turned heads, attention's output and log-sum-exp
    token = (8 + 2 * a) * config.d_model + 8 + 3 * a * config.head_dim * heads + 4 * config.n_heads
    if not config.is_moe(layer):
        return N * (token + 3 * a * config.d_ff)
    token += 3 * a * config.moe_d_ff if config.shared_expert else 0
    return N * token + (_fused if fused else _reference)(config, N, a)


def last_norm_bytes(config: TransformerConfig, N: int) -> int:
    """The stream at the last norm with its 1/rms, and the ids that the embedding looked up."""
    return N * (4 * config.d_model + 4 + 8)


def head_bytes(config: TransformerConfig, N: int, bf16: bool, fused: bool = True) -> int:
    """The gradients of hidden rows and of the head's weight, which the loss computes at once."""
    gradients = (2 if bf16 else 4) * N * config.d_model + 4 * config.vocab_size * config.d_model
    # and the count of predictions, with the fused loss itself
    return gradients + 8 + (4 if fused else 0)


def _fused(config: TransformerConfig, N: int, a: int) -> int:
    E, k, F = config.num_experts, config.experts_per_token, config.moe_d_ff
    tiles = -(-N * k // _TILE_ROWS) + E
    # gate and up rows of each choice, its row and slot, and the router's own
    return N * (2 * a * k * F + 16 * k + 16 * E + 9) + 12 * tiles + 12 * E + 4


def _reference(config: TransformerConfig, N: int, a: int) -> int:
    E, k, F, D = config.num_experts, config.experts_per_token, config.moe_d_ff, config.d_model
    # rows before and after the experts, gate, up and what they give, places, the router's own
    return N * (2 * a * k * D + 3 * a * k * F + 25 * k + 16 * E + 9) + 4 * E
