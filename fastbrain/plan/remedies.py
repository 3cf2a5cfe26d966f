"""The chapter's six ways out when a step does not fit, with what each would save."""

from dataclasses import dataclass, replace

from fastbrain.config import TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.plan.cards import Card, find_card
from fastbrain.plan.memory import memory


@dataclass(frozen=True)
class Remedy:
    """One way out.

    Attributes:
        text: what to do, as a sentence without its end.
        saved_bytes: of the peak; 0 where it would save nothing here.
    """

    text: str
    saved_bytes: int

    def __str__(self) -> str:
        if self.saved_bytes < 2**19:
            return f"{self.text}: saves nothing here"
        return f"{self.text}: saves about {self.saved_bytes / 2**20:,.0f} MiB"


def remedies(
    config: TransformerConfig,
    card: Card | str,
    batch: int,
    seq: int,
    *,
    mixed_precision: bool,
    accumulate: int = 1,
    shards: int = 1,
) -> tuple[Remedy, ...]:
    """The six, cheapest first; each is reckoned from the shape as it is, not after the others.

    Args:
        config: the model that does not fit.
        card: which it does not fit on.
        batch: rows of a micro-batch.
        seq: tokens of a row.
        mixed_precision: whether it is on.
        accumulate: micro-batches of a step.
        shards: ranks that weights, gradients and moments are cut up over.
    """
    card = find_card(card) if isinstance(card, str) else card
    peak = memory(config, card, batch, seq, mixed_precision, accumulate, shards).peak_bytes

    def saved(
        other: TransformerConfig | None,
        rows: int = batch,
        tokens: int = seq,
        bf16: bool = mixed_precision,
        micro: int = accumulate,
    ) -> int:
        if other is None or rows < 1 or tokens < 1:
            return 0
        return max(0, peak - memory(other, card, rows, tokens, bf16, micro, shards).peak_bytes)

    half = batch // 2
    kv = _changed(config, n_kv_heads=config.n_kv_heads // 2)
    experts = None
    if config.moe_layers:
        experts = _changed(
            config, num_experts=2 * config.num_experts, moe_d_ff=max(config.moe_d_ff // 2, 1)
        )
    kept = [layer for layer in config.moe_layers if layer < config.n_layers * 3 // 4]
    fewer = _changed(config, n_layers=max(config.n_layers * 3 // 4, 1), moe_layers=tuple(kept))
    return (
        Remedy(
            f"a micro-batch of {half} instead of {batch}, with twice the accumulation"
            if half
            else "a smaller micro-batch, but it is 1 already",
            # which keeps gradients from one micro-batch to the next
            saved(config if half else None, rows=half, micro=2 * accumulate),
        ),
        Remedy(
            "mixed precision, which is on already" if mixed_precision else "mixed precision",
            saved(config, bf16=True),
        ),
        Remedy(
            f"sequences of {seq // 2} tokens instead of {seq}",
            saved(config, tokens=seq // 2),
        ),
        Remedy(
            f"key-value heads {config.n_kv_heads // 2} instead of {config.n_kv_heads} "
            "(another model: start over)"
            if kv
            else f"fewer key-value heads than {config.n_kv_heads}, but none fit "
            f"{config.n_heads} heads (another model: start over)",
            saved(kv),
        ),
        Remedy(
            f"{2 * config.num_experts} experts of {config.moe_d_ff // 2} instead of "
            f"{config.num_experts} of {config.moe_d_ff}: as many parameters, fewer of them active "
            "(another model: start over)"
            if experts
            else "more, narrower experts, of which this model has none (another model: start over)",
            saved(experts),
        ),
        Remedy(
            f"{config.n_layers * 3 // 4} layers instead of {config.n_layers}, or a smaller "
            "d_model (another model: start over)"
            if config.n_layers > 1
            else "a smaller d_model; there is but 1 layer (another model: start over)",
            saved(fewer),
        ),
    )


def _changed(config: TransformerConfig, **fields: object) -> TransformerConfig | None:
    try:
        return replace(config, **fields)  # type: ignore[arg-type]
    except InvalidConfig:
        return None
