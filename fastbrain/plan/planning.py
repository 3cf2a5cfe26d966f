"""`plan`: everything above put together for one shape on one card."""

from dataclasses import dataclass

from fastbrain.config import ParameterCounts, TransformerConfig
from fastbrain.errors import InvalidConfig, SequenceTooLong
from fastbrain.plan.cards import HOME, Card, find_card
from fastbrain.plan.memory import Memory, largest_micro_batch, memory
from fastbrain.plan.operations import PARTS, training_step
from fastbrain.plan.rates import Timed, host_bound, step_ms, timed

TOKENS_PER_PARAMETER = 20
ASPECT_RATIOS = (50, 100)
MOST_LAYERS = 10_000
_DAY_S = 86_400


@dataclass(frozen=True)
class Plan:
    """What one training step of a shape costs on a card. All of it is predicted.

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
        step_ms: of a step.
        host_bound: whether starting the operations takes longer than doing them.
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
    step_ms: float
    host_bound: bool

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq * self.accumulate

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_ms * 1e3

    @property
    def tflops(self) -> float:
        """By the reference crate's formula, in 1e12 operations per second."""
        return self.tokens_per_s * flops_per_token(self.config, self.seq) / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops` over the card's peak in this precision."""
        return self.tflops * 1e12 / self.card.flops(self.mixed_precision)

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
        """Milliseconds of each part of the step, and of the gaps between launches."""
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for each in self.operations:
            parts[each.operation.part] += each.ms
        # on a CPU there are none
        gaps = 0.0 if self.card.is_cpu else max(0.0, self.step_ms - sum(parts.values()))
        parts["gaps between launches"] = gaps
        return parts

    def largest_micro_batch(self, budget_bytes: int | None = None) -> int | None:
        """The most rows that fit a budget, or else the card, with accumulation.

        None where there is no budget and the card's memory is unknown.
        """
        budget = self.card.memory_bytes if budget_bytes is None else budget_bytes
        if budget_bytes is None and not budget:
            return None
        return largest_micro_batch(self.config, self.card, self.seq, self.mixed_precision, budget)


def plan(
    config: TransformerConfig,
    card: Card | str = HOME,
    batch: int = 8,
    seq: int = 1024,
    *,
    mixed_precision: bool | None = None,
    accumulate: int = 1,
) -> Plan:
    """Predicts a training step.

    Args:
        config: the model.
        card: its key in `CARDS`, "this-machine", or a card.
        batch: rows of a micro-batch.
        seq: tokens of a row.
        mixed_precision: BF16 operands or FP32 ones; by default BF16 except on a CPU.
        accumulate: micro-batches of a step.

    Raises:
        InvalidConfig: the card is not known, a number is not a whole one above 0, or the model
            has adapters, of which nothing is predicted.
        SequenceTooLong: `seq` exceeds the model's `max_seq_len`.
    """
    for name, value in (("batch", batch), ("seq", seq), ("accumulate", accumulate)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidConfig(f"{name} must be a whole number above 0, got {value!r}")
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
    operations = tuple(
        timed(each, card) for each in training_step(config, batch, seq, bf16, accumulate)
    )
    return Plan(
        config,
        card,
        batch,
        seq,
        accumulate,
        bf16,
        config.parameter_counts(),
        memory(config, card, batch, seq, bf16, accumulate),
        operations,
        step_ms(operations, card),
        host_bound(operations, card),
    )


def flops_per_token(config: TransformerConfig, seq: int) -> int:
    """6 * active + 12 * L * seq * d_model, as the reference crate counts them.

    Backward is twice forward; attention is counted whole, not by its causal half.
    """
    return 6 * config.parameter_counts().active + 12 * config.n_layers * seq * config.d_model
