"""What a training step holds at its fullest moment, by component.

A step has four kinds of such moments, and the peak is the largest of them: the loss has its logits
at hand and every activation is still kept; backward is in one of the layers, gradients of the later
ones there already; the embedding's gradient meets the head's; the update runs. Weights, moments and
shadows are there in all.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fastbrain.config import TransformerConfig
from fastbrain.plan.cards import Card
from fastbrain.plan.saved import head_bytes, last_norm_bytes, layer_bytes, saved_bytes

_MIB = 2**20
_CHUNK = 2048  # rows of logits that the loss holds at a time

# outside of PyTorch's allocator: the driver's context with all kernels; assumed, not measured
CONTEXT_BYTES = 450 * _MIB
# Python with PyTorch's CPU build and fastbrain imported: measured on Linux
PROCESS_BYTES = 300 * _MIB


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step.

    Attributes:
        parts: by component, at the peak; they add up to `peak_bytes`.
        peak_bytes: of the allocator on a card, of the resident set on a CPU.
        moment: which moment the peak is, in words.
        outside_bytes: of a card, used outside of the allocator.
        activation_bytes: all that is kept between forward and backward.
    """

    parts: dict[str, int]
    peak_bytes: int
    moment: str
    outside_bytes: int
    activation_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What the card has to have free."""
        return self.peak_bytes + self.outside_bytes


def memory(
    config: TransformerConfig, card: Card, batch: int, seq: int, bf16: bool, accumulate: int = 1
) -> Memory:
    """The memory of a step of `accumulate` micro-batches of `batch` rows on a card."""
    P = config.parameter_counts().total
    fixed = {
        "weights": 4 * P,
        "moments": 8 * P,
        "shadow weights": 2 * shadowed(config) if bf16 else 0,
        "workspace": card.workspace_bytes,
        "the process itself": PROCESS_BYTES if card.is_cpu else 0,
    }
    N = batch * seq
    moments = {}
    for name, found in _moments(config, card, N, bf16, accumulate > 1):
        together = Counter(fixed)
        together.update(found)
        moments[name] = {part: size for part, size in together.items() if size}
    fullest = max(moments, key=lambda name: sum(moments[name].values()))
    return Memory(
        moments[fullest],
        sum(moments[fullest].values()),
        fullest,
        0 if card.is_cpu else CONTEXT_BYTES,
        saved_bytes(config, batch, seq, bf16, not card.is_cpu),
    )


def largest_micro_batch(
    config: TransformerConfig, card: Card, seq: int, bf16: bool, budget_bytes: int
) -> int:
    """The most rows of `seq` tokens whose step fits into a budget; 0 where not even one does."""

    def fits(batch: int) -> bool:
        return memory(config, card, batch, seq, bf16, 2).needed_bytes <= budget_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def shadowed(config: TransformerConfig) -> int:
    """Parameters with a BF16 copy: all that are operands of products, the router apart."""
    D = config.d_model
    vectors = D * (2 * config.n_layers + 1)
    routers = D * config.num_experts * len(config.moe_layers)
    looked_up = 0 if config.tie_embeddings else D * config.vocab_size
    return config.parameter_counts().total - vectors - routers - looked_up


def _moments(
    config: TransformerConfig, card: Card, N: int, bf16: bool, accumulating: bool
) -> Iterator[tuple[str, dict[str, int]]]:
    """Each moment's name, and the parts that are only there for a while."""
    fused = not card.is_cpu
    a, D, V = 2 if bf16 else 4, config.d_model, config.vocab_size
    everything = 4 * config.parameter_counts().total
    before = everything if accumulating else 0
    layers = [layer_bytes(config, layer, N, bf16, fused) for layer in range(config.n_layers)]
    kept = sum(layers) + last_norm_bytes(config, N)
    # normalized rows, and what the loss takes out of them
    rows = (2 if fused else 3) * a * N * D
    logits = _logits(fused, bf16) * min(N, _CHUNK) * V
    head = head_bytes(config, N, bf16, fused)
    yield "loss", {"gradients": before, "activations": kept + rows, "head": head + logits}

    table = 4 * V * D
    gradients = table + 4 * D
    for layer in reversed(range(config.n_layers)):
        gradients += 4 * _layer_parameters(config, layer)
        yield (
            f"backward in layer {layer}",
            {
                "gradients": before or gradients,
                "activations": kept,
                "layer in backward": _passing(config, layer, N, a, fused),
                "head": table if before else 0,
            },
        )
        kept -= layers[layer]
    # the table's gradient from its rows, before it joins the head's
    ends = 2 * table if before and config.tie_embeddings else table
    yield (
        "end of backward",
        {"gradients": everything, "activations": 8 * N * D, "head": ends},
    )
    # where clipping acts, the CPU scales a copy of one gradient at a time
    largest = max(table, 8 * D * config.d_ff, 8 * D * config.moe_d_ff * config.num_experts)
    yield "update", {"gradients": everything, "workspace": 0 if fused else largest}


def _logits(fused: bool, bf16: bool) -> int:
    """Bytes of one logit, with its copies."""
    if fused:
        return 2 if bf16 else 4
    # PyTorch's log-softmax takes a copy; a CPU without BF16 products widens and narrows twice
    return 16 if bf16 else 8


def _passing(config: TransformerConfig, layer: int, N: int, a: int, fused: bool) -> int:
    """What a layer's backward allocates and drops again: mostly gradients of activations."""
    D, P = config.d_model, N * config.experts_per_token
    moe = config.is_moe(layer)
    rows, F = (P, config.moe_d_ff) if moe else (N, config.d_ff)
    # the stream's gradient twice, and the branch's
    stream = N * D * (8 + a)
    if fused:
        return stream + 3 * a * rows * F + (a * P * D if moe else 0)
    # sums and activations in FP32, whatever the operands
    return stream + 20 * rows * F + (8 * P * D if moe else 0)


def _layer_parameters(config: TransformerConfig, layer: int) -> int:
    D = config.d_model
    heads = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim
    if not config.is_moe(layer):
        return D * (heads + 2 + 3 * config.d_ff)
    experts = config.num_experts + (1 if config.shared_expert else 0)
    return D * (heads + 2 + config.num_experts + 3 * config.moe_d_ff * experts)
