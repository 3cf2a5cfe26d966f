"""What a training step holds at its fullest moment, by component.

A step has four kinds of such moments, and the peak is the largest of them: the loss has its logits
at hand and every activation is still kept; backward is in one of the layers, gradients of the later
ones there already; the embedding's gradient meets the head's; the update runs. What the model takes
then, whole or in shards, is in `fastbrain.plan.model_bytes`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fastbrain.config import TransformerConfig
from fastbrain.plan.cards import Card
from fastbrain.plan.model_bytes import GATHERED, UNSHARDED, Sharded, Whole
from fastbrain.plan.saved import head_bytes, last_norm_bytes, layer_bytes, saved_bytes

_MIB = 2**20
_CHUNK = 2048  # rows of logits that the loss holds at a time

# outside of PyTorch's allocator: the driver's context with all kernels; assumed, not measured
CONTEXT_BYTES = 450 * _MIB
# Python with PyTorch's CPU build and fastbrain imported: measured on Linux
PROCESS_BYTES = 300 * _MIB

_PASSING_PARTS = (
    "gradients", GATHERED, UNSHARDED, "activations", "layer in backward", "head"
)  # fmt: skip


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
    config: TransformerConfig,
    card: Card,
    batch: int,
    seq: int,
    bf16: bool,
    accumulate: int = 1,
    shards: int = 1,
) -> Memory:
    """The memory of a step of `accumulate` micro-batches of `batch` rows on a card.

    Args:
        config: the model.
        card: where.
        batch: rows of a micro-batch.
        seq: tokens of a row.
        bf16: whether operands are BF16.
        accumulate: micro-batches of a step.
        shards: ranks that weights, gradients and moments are cut up over; 1 where a rank keeps
            all of them, as a single process does.
    """
    accumulating = accumulate > 1
    model = (
        Whole(config, bf16, accumulating)
        if shards == 1
        else Sharded(config, bf16, accumulating, shards)
    )
    fixed = {
        **model.fixed,
        "workspace": card.workspace_bytes,
        "the process itself": PROCESS_BYTES if card.is_cpu else 0,
        # and in this order what is there for a while
        **dict.fromkeys(_PASSING_PARTS, 0),
    }
    N = batch * seq
    moments = {}
    for name, found in _moments(config, model, card, N, bf16):
        together = Counter(fixed)
        for parts in found:
            together.update(parts)
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
    config: TransformerConfig,
    card: Card,
    seq: int,
    bf16: bool,
    budget_bytes: int,
    shards: int = 1,
) -> int:
    """The most rows of `seq` tokens whose step fits into a budget; 0 where not even one does."""

    def fits(batch: int) -> bool:
        return memory(config, card, batch, seq, bf16, 2, shards).needed_bytes <= budget_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _moments(
    config: TransformerConfig, model: Whole | Sharded, card: Card, N: int, bf16: bool
) -> Iterator[tuple[str, tuple[dict[str, int], ...]]]:
    """Each moment's name, and the parts that are only there for a while."""
    fused = not card.is_cpu
    a, D, V = 2 if bf16 else 4, config.d_model, config.vocab_size
    layers = [layer_bytes(config, layer, N, bf16, fused) for layer in range(config.n_layers)]
    kept = sum(layers) + last_norm_bytes(config, N)
    # normalized rows, and what the loss takes out of them
    rows = (2 if fused else 3) * a * N * D
    logits = _logits(fused, bf16) * min(N, _CHUNK) * V
    head = head_bytes(config, N, bf16, fused)
    yield "loss", (model.loss(), {"activations": kept + rows, "head": head + logits})
    for layer in reversed(range(config.n_layers)):
        passing = {
            "activations": kept,
            "layer in backward": _passing(config, layer, N, a, fused),
        }
        yield f"backward in layer {layer}", (model.backward(layer), passing)
        kept -= layers[layer]
    yield "end of backward", (model.end(), {"activations": 8 * N * D})
    # where clipping acts, the CPU scales a copy of one gradient at a time; of a shard less than is
    # gathered before, so that it is no peak there
    largest = max(4 * V * D, 8 * D * config.d_ff, 8 * D * config.moe_d_ff * config.num_experts)
    yield "update", (model.update(), {"workspace": 0 if fused else largest})


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
