"""The operations of one training step: what each computes, moves and launches.

Products count 2 operations per multiply-add. Bytes are those that have to cross the memory bus,
each operand read and each result written once. Shape letters are in `fastbrain.config`; a is the
bytes of an activation (2 under mixed precision, else 4), U = B H S^2 K, P = N k routed slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastbrain.config import TransformerConfig
from fastbrain.plan.groups import block_group, root_group, shard_parameters

PARTS = ("products", "attention", "experts", "head and loss", "norms and the rest", "optimizer")


@dataclass(frozen=True)
class Operation:
    """One kind of work, all its repetitions in a step together.

    Attributes:
        name: what it is.
        part: one of `PARTS`.
        rate: a key of `fastbrain.plan.rates.RATES`.
        flops: operations in all.
        bytes: in all.
        launches: kernels started.
        bf16: whether its products have BF16 operands.
        kernel: of our own kernels that instructions limit: its name among the simulated shares.
        size: at which to look its share up.
        head_dim: of attention.
        share: of the peak that its products reach, where neither table says it; else 0.
    """

    name: str
    part: str
    rate: str
    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 1.0
    bf16: bool = False
    kernel: str = ""
    size: float = 0.0
    head_dim: int = 0
    share: float = 0.0

    def times(self, count: float) -> "Operation":
        """The same work, `count` times."""
        return replace(
            self,
            flops=self.flops * count,
            bytes=self.bytes * count,
            launches=self.launches * count,
        )


def training_step(
    config: TransformerConfig,
    batch: int,
    seq: int,
    bf16: bool,
    accumulate: int = 1,
    shards: int = 1,
) -> list[Operation]:
    """Everything that one step does, `accumulate` micro-batches of `batch` rows and the update.

    With `shards` above 1 weights, gradients and moments are cut up over so many ranks, and these
    are the operations of one of them; what it sends is in `fastbrain.plan.communication`.
    """
    step = _Step(config, batch, seq, bf16)
    moe = sum(config.is_moe(layer) for layer in range(config.n_layers))
    found = [op.times(config.n_layers) for op in step.attention_block()]
    found += [op.times(config.n_layers - moe) for op in step.dense_block()]
    found += [op.times(moe) for op in step.moe_block()]
    found += [*step.embedding(), *step.head()]
    found += step.gathering() if shards > 1 else []
    found = [op.times(accumulate) for op in found if op.launches]
    kept = shard_parameters(config, shards)
    if accumulate > 1:
        added = 12.0 * kept * (accumulate - 1)
        found.append(Operation("adding gradients up", "optimizer", "stream", bytes=added))
    return found + list(step.update(kept, bf16 and shards == 1))


class _Step:
    """The sizes of one micro-batch."""

    def __init__(self, config: TransformerConfig, batch: int, seq: int, bf16: bool) -> None:
        self.config = config
        self.bf16 = bf16
        self.a = 2 if bf16 else 4
        self.S = seq
        self.N = batch * seq
        self.D = config.d_model
        self.U = float(batch * config.n_heads * seq**2 * config.head_dim)
        self.heads = config.n_heads * config.head_dim
        self.kv = config.n_kv_heads * config.head_dim

    def attention_block(self) -> Iterator[Operation]:
        """Both norms of a block, and its attention with its projections."""
        N, D, a = self.N, self.D, self.a
        qkv = self.heads + 2 * self.kv
        rest = "norms and the rest"
        # the addition to the FP32 stream is inside; backward adds the stream's gradient
        yield Operation("norms", rest, "stream", bytes=2.0 * N * D * (8 + 2 * a), launches=2)
        yield Operation(
            "norms backward", rest, "stream", bytes=2.0 * N * D * (12 + 2 * a), launches=4
        )
        yield from self._linear("queries, keys, values", D, qkv)
        yield from self._linear("attention output", self.heads, D)
        turned = 2.0 * a * N * (self.heads + self.kv)
        yield Operation("rotary", rest, "stream", bytes=2 * turned, launches=2)
        yield Operation("joining their gradients", rest, "stream", bytes=2.0 * a * N * qkv)
        for direction, flops, passes, launches in (("forward", 2, 1, 1), ("backward", 5, 3, 2)):
            yield Operation(
                f"attention {direction}",
                "attention",
                "kernels",
                flops=flops * self.U,
                bytes=2.0 * passes * a * N * (self.heads + self.kv),
                launches=launches,
                bf16=self.bf16,
                kernel=direction,
                size=self.S,
                head_dim=self.config.head_dim,
            )

    def dense_block(self) -> Iterator[Operation]:
        """A dense feed-forward."""
        return self._feed_forward(self.config.d_ff, "")

    def moe_block(self) -> Iterator[Operation]:
        """Router, routed experts, shared expert and the auxiliary losses."""
        c, N, D, a = self.config, self.N, self.D, self.a
        E, k, F = c.num_experts, c.experts_per_token, c.moe_d_ff
        P = float(N * k)
        yield Operation(
            "router",
            "experts",
            "products",
            flops=6.0 * N * D * E,
            # widened to FP32 forward and backward, and once narrowed
            bytes=3.0 * N * D * (a + 4) + 12.0 * N * D,
            launches=8,
        )
        yield Operation(
            "choice of experts, losses", "experts", "stream", bytes=100.0 * N * E, launches=60
        )
        weights = 3.0 * E * F * D
        for name, kernel, flops, size, moved in (
            ("experts gate, up", "experts.hidden", 4, D, a * (P * D + 3 * P * F + weights)),
            ("experts down", "grouped_gemm.rows", 2, F, a * (P * F + P * D)),
            ("experts hidden gradient", "experts.hidden_grad", 2, D, a * P * (D + 5 * F)),
            ("experts input gradient", "grouped_gemm.rows", 4, 2 * F, a * P * (2 * F + D)),
            (
                "experts weight gradients",
                "grouped_gemm.weights",
                6,
                E * -(-D // 128) * 1.5 * -(-F // 128),
                a * P * (2 * D + 3 * F) + 4 * weights,
            ),
        ):
            yield Operation(
                name,
                "experts",
                "kernels",
                flops=float(flops * D * F) * (P + E * 32),
                bytes=moved,
                launches=2 if "weight" in name else 1,
                bf16=self.bf16,
                kernel=kernel,
                size=size,
            )
        # forward and backward: of every choice, and of the token
        yield Operation(
            "experts back to tokens", "experts", "stream", 0, 2 * a * D * (P + N), launches=9
        )
        if c.shared_expert:
            yield from self._feed_forward(F, "shared expert ")
        sums = 3 if c.shared_expert else 1
        yield Operation("sums of experts", "experts", "stream", 0, 3.0 * a * N * D * sums, sums)

    def embedding(self) -> Iterator[Operation]:
        """Rows of the table, and their gradient, which joins the head's where they are tied."""
        table = 4.0 * self.config.vocab_size * self.D
        moved = 8.0 * self.N * self.D + table + 12.0 * self.N * self.D
        moved += 3 * table if self.config.tie_embeddings else 0
        yield Operation("embedding", "head and loss", "stream", bytes=moved, launches=4)

    def head(self) -> Iterator[Operation]:
        """The last norm, the head, and the loss, in chunks of rows."""
        N, D, V, a = self.N, self.D, self.config.vocab_size, self.a
        chunks = -(-N // 2048)
        part = "head and loss"
        # what the first one, which adds nothing, and the last, which passes on no stream, leave
        yield Operation("last norm", part, "stream", 0, float(N * D * (10 + 2 * a)), 3)
        moved = a * (3.0 * N * V + 3 * N * D + 2 * chunks * V * D)
        # the weight's gradient grows with every chunk after the first
        moved += 8.0 * V * D * (chunks - 1) + 4 * V * D
        yield Operation(
            "head products", part, "products", 6.0 * N * D * V, moved, 3 * chunks, self.bf16
        )
        yield Operation("loss", part, "loss", bytes=3.0 * a * N * V, launches=chunks)
        scaled = 2.0 * a * N * D + 8.0 * V * D + 2.0 * a * N * D
        yield Operation("rows of the head", part, "stream", 0, scaled, chunks + 10)

    def gathering(self) -> Iterator[Operation]:
        """What sharded weights and gradients are copied, and cast when they have been gathered."""
        c = self.config
        root = root_group(c)
        blocks = [block_group(c, layer) for layer in range(c.n_layers)]
        size = sum(block.parameters for block in blocks)
        rest = "norms and the rest"
        # out of the buffer of each gather, into that of each reduce-scatter
        yield Operation(
            "copies of what is sent",
            rest,
            "stream",
            bytes=8.0 * (3 * size + 2 * root.parameters),
            launches=3.0 * c.n_layers + 2,
        )
        if self.bf16:
            # for forward and for backward; the head is done after the first
            operands = 2 * sum(block.operands for block in blocks) + root.operands
            tensors = 2 * sum(len(shape) > 1 for block in blocks for shape in block.shapes) + 1
            yield Operation("casting gathered weights", rest, "stream", 0, 6.0 * operands, tensors)

    def update(self, kept: int, shadows: bool) -> Iterator[Operation]:
        """Norm of the gradient, clipping, Adam and the shadows, of the parameters that are kept."""
        narrow = 2.0 if shadows else 0.0
        yield Operation("gradient norm", "optimizer", "stream", bytes=4.0 * kept, launches=2)
        # parameter, gradient and moments read, all but the gradient written
        yield Operation("Adam", "optimizer", "adam", bytes=(28.0 + narrow) * kept, launches=12)

    def _feed_forward(self, F: int, prefix: str) -> Iterator[Operation]:
        yield from self._linear(f"{prefix}gate, up", self.D, 2 * F)
        yield from self._linear(f"{prefix}down", F, self.D)
        moved = self.a * self.N * F
        yield Operation(
            f"{prefix}SwiGLU", "norms and the rest", "stream", bytes=8.0 * moved, launches=2
        )

    def _linear(self, name: str, inputs: int, outputs: int) -> Iterator[Operation]:
        """Forward, the input's gradient and the weight's, the last in FP32."""
        N, a = self.N, self.a
        flops = 2.0 * N * inputs * outputs
        rows, weight = a * N * (inputs + outputs), inputs * outputs
        for suffix, moved in (
            ("", rows + a * weight),
            (" input gradient", rows + a * weight),
            (" weight gradient", rows + 4 * weight),
        ):
            yield Operation(name + suffix, "products", "products", flops, moved, 1, self.bf16)
