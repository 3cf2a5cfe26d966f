"""The dense layers of a block: weights with BF16 shadows, norm, attention, feed-forward.

Precision follows the activations: a BF16 operand is multiplied by a weight's BF16 shadow, an FP32
one by the FP32 master itself, so no layer has a precision setting.
"""

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from fastbrain.config import LinearScaling, Llama3Scaling, LoraConfig, TransformerConfig
from fastbrain.kernels import causal_attention, linear, rms_norm, rotary, swiglu

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Adapter(nn.Module):
    """Low-rank updates of the projections that one weight (..., O, I) holds, as `LoraConfig` says.

    Each projection has a `down` of its own; their `up` lie one below the other, as they do.

    Args:
        weight: what it is for.
        rows: of each projection in turn, O in all.
        lora: rank and strength.
    """

    def __init__(self, weight: Tensor, rows: Sequence[int], lora: LoraConfig) -> None:
        super().__init__()
        *stacked, outputs, inputs = weight.shape
        assert sum(rows) == outputs
        self.rows = list(rows)
        self.scale = lora.alpha / lora.rank
        self.down = nn.Parameter(weight.new_empty(*stacked, len(self.rows), lora.rank, inputs))
        self.up = nn.Parameter(weight.new_zeros(*stacked, outputs, lora.rank))

    def fold(self, weight: Tensor) -> Tensor:
        """The weight with its updates, (..., O, I), differentiable for `up` and `down`."""
        ups = torch.split(self.up, self.rows, dim=-2)
        products = [up @ down for up, down in zip(ups, self.down.unbind(-3), strict=True)]
        return weight + self.scale * torch.cat(products, dim=-2)


class Weight(nn.Module):
    """A master weight and, once a narrower operand has met it, the shadow such operands use.

    A shadow is cast again whenever the master may have been written since. Its version tells of
    most writers. PyTorch's fused optimizers leave none, nor does one that writes through `.data`;
    so a step of any `torch.optim.Optimizer` counts as a write of all its parameters. Other writes
    through `.data` are not seen.

    Attributes:
        transient: whether the master is there only while it is used, gathered from shards. Then
            nothing made from it is kept: neither its version nor its address tells of a new value,
            and a shadow held until backward would be a whole copy of the weights.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.shadow: Tensor | None = None
        self.adapter: Adapter | None = None
        self.transient = False
        self._cast_at: tuple[int, int] | None = None
        self._folded: tuple[object, tuple[Tensor, Tensor | None]] | None = None

    def operand(self, dtype: torch.dtype) -> Tensor | None:
        """The shadow to multiply by operands of this dtype; None where the master itself is."""
        if dtype == self.weight.dtype:
            return None
        if self.transient:
            return _passing_shadow(self, dtype)
        if self.shadow is None or self._cast_at != self._state():
            _watch_optimizers()
            _shadowed.add(id(self.weight))
            # a new tensor: a graph that is still to run backward may hold the old one
            with torch.inference_mode(False):
                self.shadow = self.weight.detach().to(dtype, copy=True)
            self._cast_at = self._state()
        return self.shadow

    def adapt(self, rows: Sequence[int], lora: LoraConfig) -> None:
        """Gives the projections that it holds, of so many rows each, an adapter."""
        self.adapter = Adapter(self.weight, rows, lora)

    @torch.no_grad()
    def merge(self) -> None:
        """Makes the adapter's updates part of the weight; there is none afterwards."""
        if self.adapter is not None:
            self.weight.copy_(self.adapter.fold(self.weight))
            self.adapter = self._folded = None

    def keep_shadow_in_step(self) -> None:
        """Says that an optimizer has just written master and shadow alike."""
        self._cast_at = self._state()

    def drop_shadow(self) -> None:
        self.shadow = None
        self._folded = None

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The weight to differentiate, adapter included, and the shadow for operands of `dtype`."""
        if self.adapter is None:
            return self.weight, self.operand(dtype)
        if torch.is_grad_enabled() or self.transient:
            self._folded = None  # training needs the memory
            return _with_shadow(self.adapter.fold(self.weight), dtype)
        # decoding asks for it at every token
        _watch_optimizers()
        _shadowed.update(map(id, self.parameters()))
        key = (dtype, *((p.data_ptr(), p._version) for p in self.parameters()))
        if self._folded is None or self._folded[0] != key:
            self._folded = key, _with_shadow(self.adapter.fold(self.weight), dtype)
        return self._folded[1]

    def _state(self) -> tuple[int, int]:
        return self.weight._version, self.weight.data_ptr()


def _passing_shadow(weight: Weight, dtype: torch.dtype) -> Tensor:
    shadow = weight.weight.detach().to(dtype, copy=True)
    _passing[shadow] = weight, dtype
    return shadow


@contextmanager
def casting_again() -> Iterator[None]:
    """A forward whose graph keeps no shadow of a transient weight: backward casts it again.

    By then the master has to be there again, as FSDP2 sees to.
    """

    def pack(saved: Tensor) -> Tensor | tuple[Weight, torch.dtype]:
        found = _passing.get(saved)
        return saved if found is None else found

    def unpack(kept: Tensor | tuple[Weight, torch.dtype]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].weight.detach().to(kept[1])

    with saved_tensors_hooks(pack, unpack):
        yield


# shadows of transient weights, for as long as they live
_passing: MutableMapping[Tensor, tuple[Weight, torch.dtype]] = WeakIdKeyDictionary()


def _with_shadow(folded: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return folded, None if dtype == folded.dtype else folded.detach().to(dtype)


# ids of masters that have had a shadow, or were folded into one; one that has died does no harm
_shadowed: set[int] = set()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_mark_written)


def _mark_written(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        increment_version([p for p in group["params"] if id(p) in _shadowed])


class Linear(Weight):
    """y = x @ weight.T, without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, *self.operands(x.dtype))


class RmsNorm(nn.Module):
    """RMSNorm of the residual stream, the addition to it included."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(
        self, x: Tensor, residual: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Rows (N, D) to the normalized rows in `dtype`, and the stream after the addition."""
        return rms_norm(x, self.weight, self.eps, residual, dtype)


class Rotary(NamedTuple):
    """The rotary table, and where in it the tokens of a batch stand.

    Attributes:
        cos: (max_seq_len, K/2), FP32.
        sin: (max_seq_len, K/2), FP32.
        positions: (B, S) int, or None where every sequence starts at 0.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None


def rotary_table(config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines (max_seq_len, K/2) of position * base^(-2j/K), all in FP32."""
    frequency = rotary_frequencies(config)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        frequency = frequency / scaling.factor
    elif scaling is not None:
        frequency = frequency * llama3_multipliers(frequency, scaling)
    angle = torch.arange(config.max_seq_len, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotary_frequencies(config: TransformerConfig) -> Tensor:
    """base^(-2j/K) of every pair of channels, (K/2), FP32, before any scaling."""
    channel = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    base = torch.tensor(config.rope_base, dtype=torch.float32)
    return base.pow(-channel / config.head_dim)


def llama3_multipliers(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    """What Llama 3's rule multiplies each of these frequencies by."""
    wavelength = 2 * math.pi / frequency
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # from 0 at the longest wavelengths to 1 at the shortest, which stay as they are
    keep = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) / scaling.factor + keep


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values are one product."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.head_dim = config.head_dim
        self.qkv = Linear(config.d_model, sum(self.heads) * config.head_dim)
        self.out = Linear(config.n_heads * config.head_dim, config.d_model)

    def adapt(self, lora: LoraConfig) -> None:
        """Gives all four projections an adapter."""
        self.qkv.adapt([heads * self.head_dim for heads in self.heads], lora)
        self.out.adapt([self.out.weight.shape[0]], lora)

    def forward(self, x: Tensor, rope: Rotary, attend: Attend) -> Tensor:
        """(B, S, D) to (B, S, D); `attend` maps turned q, k and v to (B, S, H, K)."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        q, k = rotary(q, k, rope.cos, rope.sin, positions=rope.positions)
        out: Tensor = self.out(attend(q, k, v).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU; gate and up are one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden)
        self.down = Linear(hidden, width)

    def adapt(self, lora: LoraConfig) -> None:
        """Gives all three projections an adapter."""
        width, hidden = self.down.weight.shape
        self.gate_up.adapt([hidden, hidden], lora)
        self.down.adapt([width], lora)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate_up(x)))
        return out


def attend_within(segments: Tensor | None) -> Attend:
    """Causal attention inside each document: see `fastbrain.kernels.causal_attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, segments=segments)

    return attend
