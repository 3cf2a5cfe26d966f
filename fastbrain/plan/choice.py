"""How the ranks of a run share a model, and why: the whole of it on each, or a shard of it.

A replica keeps its gradients from step to step, in the buffers that they are sent in: its memory is
that of a step which accumulates.
"""

from dataclasses import dataclass

from fastbrain.config import TransformerConfig
from fastbrain.plan.cards import Card
from fastbrain.plan.communication import Parallel
from fastbrain.plan.memory import Memory, memory

ASKED = ("auto", "ddp", "fsdp")
_MIB = 2**20


@dataclass(frozen=True)
class Choice:
    """A way to share a model.

    Attributes:
        parallel: "ddp" or "fsdp".
        why: a clause.
    """

    parallel: Parallel
    why: str


def chosen(
    config: TransformerConfig,
    card: Card,
    batch: int,
    seq: int,
    bf16: bool,
    accumulate: int,
    ranks: int,
    asked: str = "auto",
    budget_bytes: int | None = None,
    frozen: int = 0,
) -> tuple[Choice | None, Memory]:
    """The way to share a model, None with one rank, and what a rank's step holds then.

    Args:
        config: the model.
        card: of each rank.
        batch: rows of a micro-batch.
        seq: tokens of a row.
        bf16: whether operands are BF16.
        accumulate: micro-batches of a step.
        ranks: that share it.
        asked: one of `ASKED`; "auto" is "ddp" where it fits.
        budget_bytes: what has to suffice; by default the card's memory. 0 is unknown.
        frozen: parameters without gradient and moments, beside adapters that are trained.
    """
    if ranks == 1:
        return None, memory(config, card, batch, seq, bf16, accumulate)
    replica = memory(config, card, batch, seq, bf16, max(accumulate, 2))
    sharded = memory(config, card, batch, seq, bf16, accumulate, ranks)
    if asked == "ddp":
        return Choice("ddp", "as asked for"), replica
    if asked == "fsdp":
        return Choice("fsdp", "as asked for"), sharded
    budget = card.memory_bytes if budget_bytes is None else budget_bytes
    needed_bytes = replica.needed_bytes - 12 * frozen
    needed = f"{needed_bytes / _MIB:,.0f} MiB"
    if not budget:
        return Choice("ddp", "whether it fits is unknown"), replica
    if needed_bytes <= budget:
        why = f"the whole model fits each rank: {needed} of {budget / _MIB:,.0f}"
        return Choice("ddp", why), replica
    why = f"the whole model would need {needed} on each rank, which has {budget / _MIB:,.0f}"
    return Choice("fsdp", why), sharded
