"""The model as an `nn.Module`, and the one map between its parameters and the crate's tensors.

Projections that can be one product are one parameter here: queries, keys and values; gate and up;
the experts of a layer. Every file keeps them apart. `pieces` lists the separate tensors in file
order, and says which part of which parameter each of them is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbrain.config import LoraConfig, TransformerConfig
from fastbrain.errors import SequenceTooLong
from fastbrain.kernels import linear, linear_cross_entropy
from fastbrain.layers import (
    Attend,
    Attention,
    FeedForward,
    RmsNorm,
    Rotary,
    Weight,
    attend_within,
    rotary_table,
)
from fastbrain.moe import MixtureOfExperts
from fastbrain.stdrng import StdRng

_EMBEDDING_BOUND = 0.02
# how the names of an adapter's two tensors end
LORA_DOWN, LORA_UP = "lora_A.weight", "lora_B.weight"
# which of the projections that lie in one weight it is
_PLACE = {
    "q_proj": 0, "k_proj": 1, "v_proj": 2, "o_proj": 0, "gate_proj": 0, "up_proj": 1, "down_proj": 0
}  # fmt: skip


class Block(nn.Module):
    """Attention and feed-forward, each reading the normalized residual stream."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.d_model, config.rmsnorm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RmsNorm(config.d_model, config.rmsnorm_eps)
        self.feed_forward = (
            MixtureOfExperts(config)
            if config.is_moe(layer)
            else FeedForward(config.d_model, config.d_ff)
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: int,
        rope: Rotary,
        attend: Attend,
        valid: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the last block adds (N, D), and the stream so far, to the same after this one.

        The addition itself happens inside the next norm, which has to read both anyway. `batch` is
        B, of N = B * S tokens.
        """
        y, residual = self.attention_norm(x, residual, dtype)
        y = self.attention(y.unflatten(0, (batch, -1)), rope, attend)
        y, residual = self.feed_forward_norm(y.flatten(0, 1), residual, dtype)
        auxiliary = None
        if isinstance(self.feed_forward, MixtureOfExperts):
            y, auxiliary = self.feed_forward(y, valid)
        else:
            y = self.feed_forward(y)
        return y, residual, auxiliary


class Transformer(nn.Module):
    """A decoder-only transformer. Its parameters are unset until `initialize` or a file fills them.

    Attributes:
        mixed_precision: whether matrix products take BF16 operands; weights, gradients and the
            residual stream are FP32 either way.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.mixed_precision = False
        self.embedding = Weight(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RmsNorm(config.d_model, config.rmsnorm_eps)
        self.lm_head = None if config.tie_embeddings else Weight(config.vocab_size, config.d_model)
        cos, sin = rotary_table(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        if config.lora is not None:
            self.add_adapters(config.lora)

    def add_adapters(self, lora: LoraConfig) -> None:
        """Gives every projection an adapter, unset as all parameters are, and freezes the rest."""
        self.config = replace(self.config, lora=lora)
        self.requires_grad_(False)
        for layer in self.modules():
            if isinstance(layer, Block):
                layer.attention.adapt(lora)
                layer.feed_forward.adapt(lora)

    def merge_adapters(self) -> None:
        """Makes the adapters part of the weights, which can be trained again."""
        for weight in self.modules():
            if isinstance(weight, Weight):
                weight.merge()
        self.requires_grad_(True)
        self.config = replace(self.config, lora=None)

    def forward(
        self,
        ids: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
        max_rows: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Logits; or, given targets and their mask, the loss, without ever holding the logits.

        Args:
            ids: (B, S) int64 in [0, V).
            segments: (B, S) int32, non-decreasing: the document of each position, when a row
                packs several that must not see each other.
            positions: (B, S) int32, when they do not simply count from 0 in every row.
            targets: (B, S) int64: the id that each position is to predict. One outside [0, V)
                is an error where the mask counts it, and makes the loss NaN.
            mask: (B, S) bool: the positions that are to predict.
            valid: (B, S) bool: False on padding, which is then not routed to experts.
            max_rows: an upper bound on `mask.sum()`, known to the host.

        Returns:
            Without targets, logits (B, S, V), FP32. With them: the summed loss (0-d FP32), the
            number of predictions (0-d int64) and the auxiliary loss (0-d FP32).
        """
        if ids.dim() != 2:
            raise ValueError(f"ids must have 2 dimensions, (B, S), got shape {tuple(ids.shape)}")
        if positions is None and ids.shape[1] > self.config.max_seq_len:
            raise SequenceTooLong(ids.shape[1], self.config.max_seq_len)
        if targets is None and mask is not None:
            raise ValueError("a mask was given without targets; pass targets=(B, S) int64 as well")
        attends = [attend_within(segments)] * len(self.blocks)
        hidden, auxiliary = self.trunk(ids, attends, positions, valid)
        if targets is None:
            return self.logits(hidden)
        if mask is None:
            raise ValueError("targets were given without a mask; pass mask=(B, S) bool as well")
        head = self.head
        loss_sum, count = linear_cross_entropy(
            hidden.flatten(0, 1),
            head.weight,
            targets.flatten(),
            mask.flatten(),
            max_rows=max_rows,
            shadow=head.operand(hidden.dtype),
        )
        return loss_sum, count, auxiliary

    @property
    def head(self) -> Weight:
        """The weight that maps hidden rows to logits: the embedding itself when tied."""
        return self.embedding if self.lm_head is None else self.lm_head

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of normalized hidden rows (..., D), at least FP32."""
        logits = linear(hidden, self.head.weight, self.head.operand(hidden.dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def trunk(
        self,
        ids: Tensor,
        attends: Sequence[Attend],
        positions: Tensor | None,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Everything before the head: normalized rows (B, S, D), and the auxiliary loss.

        `attends` has the attention of each block, so that decoding can bring its caches.
        """
        x = F.embedding(ids.flatten(), self.embedding.weight)
        dtype = torch.bfloat16 if self.mixed_precision else x.dtype
        rope = Rotary(self.rope_cos, self.rope_sin, positions)
        rows = None if valid is None else valid.flatten()
        residual = None
        auxiliary = torch.zeros(
            (), dtype=torch.promote_types(dtype, torch.float32), device=x.device
        )
        for block, attend in zip(self.blocks, attends, strict=True):
            x, residual, loss = block(x, residual, ids.shape[0], rope, attend, rows, dtype)
            auxiliary = auxiliary if loss is None else auxiliary + loss
        hidden, _ = self.norm(x, residual, dtype)
        return hidden.unflatten(0, ids.shape), auxiliary


class Piece(NamedTuple):
    """One tensor of the crate's files.

    Attributes:
        name: its Hugging Face name.
        rows: of the matrix; a vector has one.
        cols: of the matrix.
        parameter: the module's parameter that holds it.
        part: the part of the parameter that it is.
    """

    name: str
    rows: int
    cols: int
    parameter: str
    part: tuple[int | slice, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """Its matrix in the parameter, or in a gradient or moment of it; writing writes there."""
        return tensor[self.part].view(self.rows, self.cols)


def pieces(config: TransformerConfig) -> list[Piece]:
    """The crate's tensors in file order."""
    V, D = config.vocab_size, config.d_model
    found = [Piece("model.embed_tokens.weight", V, D, "embedding.weight", ())]
    for layer in range(config.n_layers):
        for piece in _block_pieces(config, layer):
            found.append(piece)
            if config.lora is not None:
                found += _adapter_pieces(piece, config.lora.rank)
    found.append(Piece("model.norm.weight", 1, D, "norm.weight", ()))
    if not config.tie_embeddings:
        found.append(Piece("lm_head.weight", V, D, "lm_head.weight", ()))
    return found


def pieces_of_parameters(config: TransformerConfig) -> dict[str, list[Piece]]:
    """The crate's tensors by the parameter that holds them."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces(config):
        found.setdefault(piece.parameter, []).append(piece)
    return found


def split_parameters(config: TransformerConfig) -> tuple[int, int]:
    """How many parameters are trained, and how many are frozen: adapters or none."""
    base = config.parameter_counts().total
    if config.lora is None:
        return base, 0
    adapters = [each for each in pieces(config) if each.name.endswith((LORA_DOWN, LORA_UP))]
    return sum(each.rows * each.cols for each in adapters), base


def named_views(
    config: TransformerConfig, tensors: Mapping[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """The crate's tensors, in file order, as 2-D views of fused ones.

    Args:
        tensors: weights, gradients or moments under the module's parameter names.

    Returns:
        (Hugging Face name, view) pairs; writing to a view writes the fused tensor.
    """
    return [(piece.name, piece.view(tensors[piece.parameter])) for piece in pieces(config)]


def initialize(module: Transformer, seed: int) -> None:
    """Fills the parameters with the crate's own initial weights for this seed, bit for bit.

    Adapters are not touched. The embedding is uniform in +-0.02, every matrix in
    +-sqrt(2 / inputs), and norms are 1. One generator is drawn from in the crate's order, in which
    a block's feed-forward comes before its attention and its router last.
    """
    rng = StdRng(seed)
    base = pieces(replace(module.config, lora=None))
    order = sorted(enumerate(base), key=lambda item: (*_draw_rank(item[1]), item[0]))
    for _, piece in order:
        if piece.name.endswith("norm.weight"):
            _view(module, piece).fill_(1.0)
        else:
            _draw(module, piece, rng)


def initialize_adapters(module: Transformer) -> None:
    """Fills the adapters with the crate's own initial values for their seed, bit for bit.

    Every `up` is 0; every `down` is uniform in +-sqrt(2 / inputs), drawn in file order.
    """
    assert module.config.lora is not None
    rng = StdRng(module.config.lora.seed)
    for piece in pieces(module.config):
        if piece.name.endswith(LORA_UP):
            _view(module, piece).zero_()
        elif piece.name.endswith(LORA_DOWN):
            _draw(module, piece, rng)


def _view(module: Transformer, piece: Piece) -> Tensor:
    return piece.view(module.get_parameter(piece.parameter).detach())


def _draw(module: Transformer, piece: Piece, rng: StdRng) -> None:
    bound = _EMBEDDING_BOUND
    if piece.name != "model.embed_tokens.weight":
        # in FP32 throughout, as the crate computes it; the last bit of PyTorch's root depends on
        # the processor
        bound = float(np.sqrt(np.float32(2) / np.float32(piece.cols)))
    draws = rng.uniform(piece.rows * piece.cols, -bound, bound)
    view = _view(module, piece)
    view.copy_(torch.from_numpy(draws).view_as(view))


def _draw_rank(piece: Piece) -> tuple[int, int]:
    """Where a tensor stands in the crate's order of drawing: (layer, part of the block)."""
    parts = piece.name.split(".")
    if parts[0] == "lm_head":
        return (1 << 30, 0)
    if parts[1] != "layers":
        return (-1, 0)
    part = 2 if parts[3] == "self_attn" else 1 if parts[3:5] == ["mlp", "gate"] else 0
    return (int(parts[2]), part)


def _block_pieces(config: TransformerConfig, layer: int) -> Iterator[Piece]:
    D = config.d_model
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    name, own = f"model.layers.{layer}", f"blocks.{layer}"
    qkv = f"{own}.attention.qkv.weight"
    yield Piece(f"{name}.input_layernorm.weight", 1, D, f"{own}.attention_norm.weight", ())
    yield Piece(f"{name}.self_attn.q_proj.weight", q, D, qkv, (slice(0, q),))
    yield Piece(f"{name}.self_attn.k_proj.weight", kv, D, qkv, (slice(q, q + kv),))
    yield Piece(f"{name}.self_attn.v_proj.weight", kv, D, qkv, (slice(q + kv, q + 2 * kv),))
    yield Piece(f"{name}.self_attn.o_proj.weight", D, q, f"{own}.attention.out.weight", ())
    yield Piece(
        f"{name}.post_attention_layernorm.weight", 1, D, f"{own}.feed_forward_norm.weight", ()
    )
    mlp, ffn = f"{name}.mlp", f"{own}.feed_forward"
    if not config.is_moe(layer):
        yield from _swiglu_pieces(mlp, D, config.d_ff, ffn, ())
        return
    E, F = config.num_experts, config.moe_d_ff
    yield Piece(f"{mlp}.gate.weight", E, D, f"{ffn}.router", ())
    for expert in range(E):
        yield from _swiglu_pieces(f"{mlp}.experts.{expert}", D, F, ffn, (expert,))
    if config.shared_expert:
        yield from _swiglu_pieces(f"{mlp}.shared_experts", D, F, f"{ffn}.shared", ())


def _adapter_pieces(piece: Piece, rank: int) -> Iterator[Piece]:
    place = _PLACE.get(piece.name.split(".")[-2])
    if place is None:
        return
    name, own = piece.name.removesuffix("weight"), piece.parameter.removesuffix("weight")
    stacked = tuple(index for index in piece.part if isinstance(index, int))
    down = f"{own}adapter.down", (*stacked, place)
    yield Piece(name + LORA_DOWN, rank, piece.cols, *down)
    yield Piece(name + LORA_UP, piece.rows, rank, f"{own}adapter.up", piece.part)


def _swiglu_pieces(
    name: str, width: int, hidden: int, own: str, stacked: tuple[int, ...]
) -> Iterator[Piece]:
    gate_up, down = f"{own}.gate_up.weight", f"{own}.down.weight"
    halves = {"gate_proj": slice(0, hidden), "up_proj": slice(hidden, 2 * hidden)}
    for half, rows in halves.items():
        yield Piece(f"{name}.{half}.weight", hidden, width, gate_up, (*stacked, rows))
    yield Piece(f"{name}.down_proj.weight", width, hidden, down, stacked)
