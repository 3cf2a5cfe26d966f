"""`plan`: everything above put together for one shape on one card, or on one each of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastbrain.config import ParameterCounts, TransformerConfig
from fastbrain.errors import InvalidConfig, SequenceTooLong
from fastbrain.plan.cards import HOME, Card, find_card
from fastbrain.plan.choice import ASKED, Choice, chosen
from fastbrain.plan.communication import Communication, Parallel, communication
from fastbrain.plan.links import Link, find_link, usual_link
from fastbrain.plan.memory import Memory, largest_micro_batch
from fastbrain.plan.operations import PARTS, training_step
from fastbrain.plan.rates import Timed, host_bound, step_ms, timed

TOKENS_PER_PARAMETER = 20
ASPECT_RATIOS = (50, 100)
MOST_LAYERS = 10_000
# the part of a step in which a rank waits for what others send
EXPOSED = "waiting for other ranks"
_DAY_S = 86_400


@dataclass(frozen=True)
class Plan:
    """What one training step of a shape costs on a card. All of it is predicted.

    With several ranks every one has such a card. Memory, operations and what is sent are those of
    one rank; tokens, and what follows from them, those of all.

    Attributes:
        config: the model.
        card: where.
        batch: rows of a micro-batch.
        seq: tokens of a row.
        accumulate: micro-batches of a step.
        mixed_precision: BF16 operands, or FP32 ones.
        counts: parameters in all, and active ones.
        memory: at the peak.
        operations: the step's, with their times.
        compute_ms: of a step without what the ranks wait for each other's gradients and weights.
        host_bound: whether starting the operations takes longer than doing them.
        ranks: processes that train together, a card each.
        choice: how the ranks share the model, and why; None with one rank.
        link: between the ranks; None with one.
        communication: of a rank; None with one.
        alone_ms: what the same micro-batches would take a rank alone.
    """

    config: TransformerConfig
    card: Card
    batch: int
    seq: int
    accumulate: int
    mixed_precision: bool
    counts: ParameterCounts
    memory: Memory
    operations: tuple[Timed, ...]
    compute_ms: float
    host_bound: bool
    ranks: int
    choice: Choice | None
    link: Link | None
    communication: Communication | None
    alone_ms: float

    @property
    def parallel(self) -> Parallel | None:
        """How the ranks share the model: "ddp", "fsdp", or None with one rank."""
        return None if self.choice is None else self.choice.parallel

    @property
    def communication_ms(self) -> float:
        """Milliseconds of a step in which a rank sends, hidden behind computing or not."""
        return 0.0 if self.communication is None else self.communication.ms

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a step; it receives as many."""
        return 0 if self.communication is None else self.communication.sent_bytes

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step."""
        exposed = 0.0 if self.communication is None else self.communication.exposed_ms
        return self.compute_ms + exposed

    @property
    def efficiency(self) -> float:
        """Tokens per second over those of as many ranks that would not have to communicate."""
        return self.alone_ms / self.step_ms

    @property
    def shards(self) -> int:
        """Ranks that weights, gradients and moments are cut up over."""
        return self.ranks if self.parallel == "fsdp" else 1

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.batch * self.seq * self.accumulate * self.ranks

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step_ms * 1e3

    @property
    def tflops(self) -> float:
        """By the reference crate's formula, in 1e12 operations per second; of all ranks."""
        return self.tokens_per_s * flops_per_token(self.config, self.seq) / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops` over the cards' peak in this precision."""
        return self.tflops * 1e12 / (self.ranks * self.card.flops(self.mixed_precision))

    @property
    def recommended_tokens(self) -> int:
        """20 for every active parameter: Hoffmann et al., 2022 (arXiv 2203.15556)."""
        return TOKENS_PER_PARAMETER * self.counts.active

    @property
    def aspect_ratio(self) -> float:
        """Width over depth; 50 to 100 is the working range."""
        return self.config.d_model / self.config.n_layers

    @property
    def fits(self) -> bool:
        """Whether the card holds the step; true where its memory is unknown."""
        have = self.card.memory_bytes
        return not have or self.memory.needed_bytes <= have

    def days(self, tokens: float = 50e9) -> float:
        """Days for so many tokens at this rate."""
        return tokens / self.tokens_per_s / _DAY_S

    def ms_by_part(self) -> dict[str, float]:
        """Milliseconds of each part of the step, of gaps, and of communication that is waited for.

        What is hidden behind computing is in none of them.
        """
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for each in self.operations:
            parts[each.operation.part] += each.ms
        # on a CPU there are none
        gaps = 0.0 if self.card.is_cpu else max(0.0, self.compute_ms - sum(parts.values()))
        parts["gaps between launches"] = gaps
        if self.communication is not None:
            parts[EXPOSED] = self.communication.exposed_ms
        return parts

    def largest_micro_batch(self, budget_bytes: int | None = None) -> int | None:
        """The most rows that fit a budget, or else the card, with accumulation.

        None where there is no budget and the card's memory is unknown.
        """
        budget = self.card.memory_bytes if budget_bytes is None else budget_bytes
        if budget_bytes is None and not budget:
            return None
        return largest_micro_batch(
            self.config, self.card, self.seq, self.mixed_precision, budget, self.shards
        )


def plan(
    config: TransformerConfig,
    card: Card | str = HOME,
    batch: int = 8,
    seq: int = 1024,
    *,
    mixed_precision: bool | None = None,
    accumulate: int = 1,
    ranks: int = 1,
    parallel: str = "auto",
    link: Link | str | float | None = None,
    budget_bytes: int | None = None,
) -> Plan:
    """Predicts a training step.

    Args:
        config: the model.
        card: its key in `CARDS`, "this-machine", or a card.
        batch: rows of a micro-batch.
        seq: tokens of a row.
        mixed_precision: BF16 operands or FP32 ones; by default BF16 except on a CPU.
        accumulate: micro-batches of a step, on each rank.
        ranks: processes that train together, each on such a card and with `batch` rows of its own.
        parallel: "ddp", every rank has the whole model; "fsdp", every rank keeps a shard of it; or
            "auto", the first where its memory suffices. Nothing to one rank.
        link: between the ranks: its key in `LINKS`, a link, or GB/s in each direction. By default
            PCIe 4.0 x8, and between CPUs, which are machines then, Ethernet of 1 Gbit/s. Nothing
            to one rank.
        budget_bytes: what "auto" keeps within; by default the card's memory.

    Raises:
        InvalidConfig: the card, the link or the way to share the model is not known, a number is
            not a whole one above 0, or the model has adapters, of which nothing is predicted.
        SequenceTooLong: `seq` exceeds the model's `max_seq_len`.
    """
    counts = {"batch": batch, "seq": seq, "accumulate": accumulate, "ranks": ranks}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidConfig(f"{name} must be a whole number above 0, got {value!r}")
    if parallel not in ASKED:
        raise InvalidConfig(f'parallel must be "auto", "ddp" or "fsdp", got {parallel!r}')
    if config.lora is not None:
        raise InvalidConfig(
            "a plan is of training whole, and this model has adapters: leave lora out; with "
            "adapters it takes less memory and no less time"
        )
    if config.n_layers > MOST_LAYERS:
        raise InvalidConfig(
            f"n_layers must be at most {MOST_LAYERS:,} for a plan, got {config.n_layers:,}; layers "
            "are planned one by one"
        )
    if seq > config.max_seq_len:
        raise SequenceTooLong(seq, config.max_seq_len)
    card = find_card(card) if isinstance(card, str) else card
    bf16 = not card.is_cpu if mixed_precision is None else mixed_precision
    if not isinstance(link, Link):
        link = usual_link(card) if link is None else find_link(link)
    choice, held = chosen(config, card, batch, seq, bf16, accumulate, ranks, parallel, budget_bytes)
    alone = _timed(config, card, batch, seq, bf16, accumulate)
    operations, sent = alone, None
    if choice is not None:
        if choice.parallel == "fsdp":
            operations = _timed(config, card, batch, seq, bf16, accumulate, ranks)
        micro_ms = _micro_ms(operations, card, accumulate)
        sent = communication(config, choice.parallel, ranks, link, micro_ms, accumulate)
    return Plan(
        config,
        card,
        batch,
        seq,
        accumulate,
        bf16,
        config.parameter_counts(),
        held,
        operations,
        step_ms(operations, card),
        host_bound(operations, card),
        ranks,
        choice,
        None if choice is None else link,
        sent,
        step_ms(alone, card),
    )


def _timed(
    config: TransformerConfig,
    card: Card,
    batch: int,
    seq: int,
    bf16: bool,
    accumulate: int,
    shards: int = 1,
) -> tuple[Timed, ...]:
    found = training_step(config, batch, seq, bf16, accumulate, shards)
    return tuple(timed(each, card) for each in found)


def _micro_ms(operations: Sequence[Timed], card: Card, accumulate: int) -> float:
    """Forward and backward of one micro-batch."""
    passes = [each for each in operations if each.operation.part != "optimizer"]
    return step_ms(passes, card) / accumulate


def flops_per_token(config: TransformerConfig, seq: int) -> int:
    """6 * active + 12 * L * seq * d_model, as the reference crate counts them.

    Backward is twice forward; attention is counted whole, not by its causal half.
    """
    return 6 * config.parameter_counts().active + 12 * config.n_layers * seq * config.d_model
