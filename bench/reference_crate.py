"""The reference crate's own list of operations, to hold the planner's time model against.

The planner predicts fastbrain, which nobody has timed on an RTX 3060 yet; the crate's steps have
been. So the same model, with the same table of rates, is given what the crate does instead of what
fastbrain does: its launches, its casts, its copies, and the simulated time of its attention. What
a version of it does is read from its published change log. Letters are in `fastbrain.config`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.published import StepRow, step_rows
from fastbrain.config import TransformerConfig
from fastbrain.plan import CARDS, Operation, step_ms, timed

CARD = CARDS["rtx3060"]


@dataclass(frozen=True)
class Attention:
    """Share of the peak that the crate's attention kernels reach on long sequences.

    Simulated from their machine code, at 4 x 1024 tokens: the table in docs/kernels.md. Their
    tiles are 64 x 64, and those on the diagonal are computed whole.
    """

    forward: float
    backward: float

    @classmethod
    def of(cls, forward_ms: float, backward_ms: float) -> "Attention":
        """From the times of 12 heads of width 64 at 4 x 1024 tokens."""
        unit = 4 * 12 * 1024**2 * 64 / CARD.tensor_flops * 1e3
        whole = 1 + 64 / 1024
        return cls(2 * unit / forward_ms * whole, 5 * unit / backward_ms * whole)


@dataclass(frozen=True)
class Crate:
    """What distinguishes one state of the crate from another.

    Attributes:
        attention: its fused kernels, or None for the three that write all scores to memory.
        activation: bytes of an activation outside attention; with 4, operands are cast first.
        qkv: bytes of queries, keys, values and what attention returns.
        residual_in_norm_backward: whether the stream's gradient is added there.
        operand_copies: bytes per token and width that copying operands moves, per block.
        bf16_output_gradient: whether the stream's gradient also comes in BF16.
        residual_in_norm_forward: whether the norm also copies the stream.
        memset: whether gradients are cleared and then added to.
        routed: bytes of the routed experts' operands.
        permutation: how often the bytes of today's permutations the older ones moved.
    """

    attention: Attention | None = None
    activation: int = 4
    qkv: int = 4
    residual_in_norm_backward: bool = False
    operand_copies: int = 8
    bf16_output_gradient: bool = False
    residual_in_norm_forward: bool = False
    memset: bool = True
    routed: int = 4
    # 17.8 ms became 4.2
    permutation: float = 17.8 / 4.2


_FIRST = Crate()
_FLASH = replace(_FIRST, attention=Attention.of(0.526, 0.627 + 0.909))
_BF16 = replace(_FLASH, activation=2)
_QKV = replace(_BF16, qkv=2)
_NORM_BACKWARD = replace(_QKV, residual_in_norm_backward=True)
_COPY = replace(_NORM_BACKWARD, operand_copies=0)
_GRADIENT = replace(_COPY, bf16_output_gradient=True)
_NORM_FORWARD = replace(_GRADIENT, residual_in_norm_forward=True)
_RELEASED = replace(_NORM_FORWARD, memset=False)
_FP32_EXPERTS = replace(_RELEASED, attention=Attention.of(0.439, 0.699 + 0.819), permutation=1.0)
_LATEST = replace(_FP32_EXPERTS, routed=2)

GENERATIONS = {
    "unfused": _FIRST,
    "archive, first": _FIRST,
    "archive, gate and up in one product": _FIRST,
    "archive, queries, keys and values in one product": _FIRST,
    "archive, last": _FIRST,
    "flash attention": _FLASH,
    "BF16 activations": _BF16,
    "BF16 queries, keys, values": _QKV,
    "residual added in the norm's backward": _NORM_BACKWARD,
    "a copy of an operand removed": _COPY,
    "BF16 gradient of the output": _GRADIENT,
    "residual copied in the norm's forward": _NORM_FORWARD,
    "2.0": _RELEASED,
    "4.0, routed experts in FP32": _FP32_EXPERTS,
    "4.0, routed experts in BF16": _LATEST,
    "4.0, router and shared expert in BF16": _LATEST,
    "4.0, flash attention for widths 64 and 128": _LATEST,
    "4.0, dK/dV kernel rewritten": _LATEST,
    "4.0, one stream": _LATEST,
    "4.0": _LATEST,
}


@dataclass(frozen=True)
class Validation:
    """A published step beside the model's.

    Attributes:
        error: of the prediction, relative: above 0 where it is too slow.
        launch_bound: whether the gaps between launches are a tenth of the prediction or more.
        note: what the miss comes from, where it exceeds `BAR`.
    """

    row: StepRow
    predicted_ms: float
    published_ms: float
    error: float
    launch_bound: bool
    note: str


_OLDER = (
    "of an older build: the sweep's 88.7M model ran at 15,620 tokens/s, and the larger 101.7M one "
    "of the comparison of frameworks at 15,760, in half the batch"
)
_THIN = "of width 128, for whose products the shares of the table are too high"
# why a row is missed by more than `BAR`
_REASONS = {
    "sweep-": _OLDER,
    "unfused-dense-102m-1x": "one row of a batch: its products do not fill the card evenly",
    "archive-dense-5m": _THIN,
    "archive-dense-5m-first": f"{_THIN}; and the products were in FP32 still",
}
BAR = 0.15


def validation() -> list[Validation]:
    """Every published step of an idle card, predicted."""
    found = []
    for row in step_rows():
        if row.step_ms is None:
            continue
        operations = [timed(op, CARD) for op in crate_step(row)]
        ms = step_ms(operations, CARD)
        published = row.step_ms.middle
        gaps = 1 - sum(op.ms for op in operations) / ms
        error = ms / published - 1
        note = _reason(row) if abs(error) > BAR else ""
        found.append(Validation(row, ms, published, error, gaps >= 0.1, note))
    return found


def _reason(row: StepRow) -> str:
    """The reason under the longest beginning of the row's name."""
    return _REASONS[max((key for key in _REASONS if row.id.startswith(key)), key=len)]


def crate_step(row: StepRow) -> list[Operation]:
    """What the crate does in the step of a published row."""
    step = _Step(GENERATIONS[row.generation], row.config, row.batch, row.seq)
    config = row.config
    moe = len(config.moe_layers)
    found = [op.times(config.n_layers) for op in step.block()]
    found += [op.times(config.n_layers - moe) for op in step.feed_forward(config.d_ff)]
    found += [op.times(moe) for op in step.experts()] if moe else []
    return [*found, *step.ends(), *step.update()]


class _Step:
    def __init__(self, crate: Crate, config: TransformerConfig, batch: int, seq: int) -> None:
        self.crate = crate
        self.config = config
        self.S = seq
        self.N = batch * seq
        self.D = config.d_model
        self.square = float(batch * config.n_heads * seq**2)
        self.heads = config.n_heads * config.head_dim
        self.kv = config.n_kv_heads * config.head_dim

    def block(self) -> Iterator[Operation]:
        c, N, D = self.crate, self.N, self.D
        act = c.activation
        copy = 4 if c.residual_in_norm_forward else 8
        yield _stream("norms", 2 * N * D * (4 + act + copy), 2 if copy == 4 else 4)
        added = 4 if c.residual_in_norm_backward else 12
        both = 2 if c.bf16_output_gradient else 0
        yield _stream("norms backward", 2 * N * D * (act + 8 + added + both), 4)
        yield _stream("copies of operands", N * D * c.operand_copies, 2)
        yield from self.linear("qkv", D, self.heads + 2 * self.kv, act, c.qkv)
        yield from self.linear("attention output", self.heads, D, c.qkv, 4, to_stream=True)
        yield _stream("rotary", 4 * c.qkv * N * (self.heads + self.kv), 4)
        yield from self.flash(c.attention) if c.attention else self.three_kernels()

    def flash(self, kernels: Attention) -> Iterator[Operation]:
        whole = 1 + 64 / self.S
        unit = self.square * self.config.head_dim
        for name, flops, share in (
            ("forward", 2, kernels.forward),
            ("backward", 5, kernels.backward),
        ):
            yield Operation(
                f"attention {name}",
                "attention",
                "kernels",
                flops * unit,
                bf16=True,
                share=share / whole,
            )
        yield _stream("attention delta", 2 * self.crate.qkv * self.N * self.heads, 1)

    def three_kernels(self) -> Iterator[Operation]:
        """Scores in FP32 to memory: seven whole products, and three passes over the scores."""
        flops = 2 * self.square * self.config.head_dim
        yield Operation(
            "attention products", "attention", "products", 7 * flops, 28 * self.square, 7, True
        )
        # softmax, probabilities again, softmax backward: by their published times and GB/s
        yield _stream("softmax", (12 + 6 + 12) * self.square, 3)

    def feed_forward(self, F: int) -> Iterator[Operation]:
        act = self.crate.activation
        yield from self.linear("gate, up", self.D, 2 * F, act, act)
        yield from self.linear("down", F, self.D, act, 4, to_stream=True)
        yield _stream("SwiGLU", 8 * act * self.N * F, 2)

    def experts(self) -> Iterator[Operation]:
        c, config, N, D = self.crate, self.config, self.N, self.D
        E, F = config.num_experts, config.moe_d_ff
        P = N * config.experts_per_token
        yield _stream("router", 60 * N * E + 20 * N * D, 20)
        # gather and scatter both ways, and the gates' gradient
        yield _stream("permutations", c.permutation * P * D * (12 + 12 + 12 + 8), 8)
        yield _stream("expert SwiGLU", 8 * 4 * P * F, 2 * E)
        if c.routed == 4:
            yield _stream("casts of routed rows", 6 * P * (2 * D + 3 * F), 4)
        for name, rows, columns, depth in (
            ("gate, up", P / E, 2 * F, D),
            ("down", P / E, D, F),
            ("down input gradient", P / E, F, D),
            ("down weight gradient", D, F, P / E),
            ("gate, up input gradient", P / E, D, 2 * F),
            ("gate, up weight gradient", 2 * F, D, P / E),
        ):
            moved = c.routed * (rows * depth + columns * depth) + 4 * rows * columns
            yield Operation(
                f"expert {name}",
                "experts",
                "products",
                2 * rows * columns * depth * E,
                moved * E,
                E,
                True,
                share=CARD.product_share * _filled(rows, columns),
            )
        if config.shared_expert:
            yield from self.feed_forward(F)

    def ends(self) -> Iterator[Operation]:
        """Embedding, last norm, head and loss."""
        N, D, V = self.N, self.D, self.config.vocab_size
        chunks = -(-N * V * 2 // 2**28)
        yield _stream("embedding", N * D * (8 + 12), 2)
        yield _stream("last norm", N * D * 20, 3)
        moved = 6 * N * V + 6 * N * D + chunks * V * D * (4 + 2)
        yield Operation("head", "head and loss", "products", 6 * N * D * V, moved, 3 * chunks, True)
        yield Operation("loss", "head and loss", "loss", 0, 6 * N * V, chunks)
        yield _stream("head weight gradient", chunks * V * D * 10, chunks)

    def update(self) -> Iterator[Operation]:
        total = self.config.parameter_counts().total
        tensors = (
            len(self.config.moe_layers) * 3 * self.config.num_experts + 7 * self.config.n_layers
        )
        yield _stream("casts of weights", 6 * total, tensors)
        if self.crate.memset:
            yield _stream("clearing gradients, adding to them", 8 * total, tensors)
        yield Operation("Adam", "optimizer", "adam", 0, 28 * total, tensors)

    def linear(
        self, name: str, inputs: int, outputs: int, x: int, y: int, to_stream: bool = False
    ) -> Iterator[Operation]:
        """A product with its gradients; x and y are bytes of an input and of an output."""
        N = self.N
        flops, weight = 2.0 * N * inputs * outputs, inputs * outputs
        dy = 2 if to_stream and self.crate.bf16_output_gradient else y
        yield _product(
            name, flops, N * (2 * inputs + y * outputs * (2 if to_stream else 1)) + 2 * weight
        )
        yield _product(name, flops, N * (2 * outputs + x * inputs) + 2 * weight)
        yield _product(name, flops, 2 * N * (inputs + outputs) + 4 * weight)
        casts = (6 * inputs if x == 4 else 0) + (6 * outputs if dy == 4 else 0)
        if casts:
            yield _stream(f"casts of {name}", N * casts, (x == 4) + (dy == 4))


def _product(name: str, flops: float, moved: float) -> Operation:
    return Operation(name, "products", "products", flops, moved, 1, True)


def _stream(name: str, moved: float, launches: float) -> Operation:
    return Operation(name, "norms and the rest", "stream", 0.0, moved, launches)


def _filled(rows: float, columns: float, tile: int = 128) -> float:
    """How much of the multiprocessors' time tiles of a small product fill."""
    tiles = -(-rows // tile) * -(-columns // tile)
    waves = -(-tiles // CARD.sms)
    return rows * columns / (waves * CARD.sms * tile**2)
