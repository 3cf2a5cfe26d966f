"""The shape of a model: its fields, the rules they obey, and the parameters they add up to.

The legend of shape letters used throughout the package:

    B sequences, S positions, N = B*S tokens, D model width, H query heads, G key-value heads,
    K head width, F hidden width, E experts, V vocabulary
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from fastbrain.errors import InvalidConfig

# the largest number that rounds to a finite 32-bit float
_LARGEST_FLOAT32 = 3.4028235677973362e38

# more than any model has; the rotary table of a damaged file's number would fill the memory
MOST_POSITIONS = 2**21
_MOST_ROTARY = 2**28


class ParameterCounts(NamedTuple):
    """How many parameters there are, and how many of them one token touches."""

    total: int
    active: int

    def __str__(self) -> str:
        total, active = self.total / 1e6, self.active / 1e6
        ratio = self.total / self.active
        return f"{total:.1f}M total / {active:.1f}M active ({ratio:.2f}x)"


@dataclass(frozen=True)
class LinearScaling:
    """Rotary frequencies divided by `factor`, which stretches the context by as much."""

    factor: float

    def __post_init__(self) -> None:
        _check_types(self)
        _round_floats(self)
        _require_positive(self, "factor")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rule: long wavelengths are divided by `factor`, short ones kept, others blended.

    `low_freq_factor` and `high_freq_factor` bound the blend, as fractions of
    `original_max_position_embeddings` (tokens).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_types(self)
        _round_floats(self)
        _require_positive(
            self,
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise InvalidConfig(
                f"rope_scaling.high_freq_factor must be above low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on every projection of attention and feed-forward.

    A projection W (outputs, inputs) becomes W + (alpha / rank) up @ down, of which only up
    (outputs, rank), zero at first, and down (rank, inputs) are trained. Router, embedding, head
    and norms have none. Hu et al., 2021 (arXiv 2106.09685).

    Attributes:
        rank: of the adapters.
        alpha: the strength; `rank` when None.
        seed: of the initial `down`, in [0, 2**63).
    """

    rank: int
    alpha: float = None  # type: ignore[assignment]
    seed: int = 0

    def __post_init__(self) -> None:
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))
        _check_types(self)
        _round_floats(self)
        if self.rank < 1:
            raise InvalidConfig(f"lora.rank must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise InvalidConfig(
                f"lora.alpha must be above 0, or the adapters do nothing; got {self.alpha:g}"
            )
        if not 0 <= self.seed < 2**63:
            raise InvalidConfig(f"lora.seed must be from 0 to 2**63 - 1, got {self.seed}")


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that decides the shape and meaning of a model; frozen and always valid.

    Floats are kept as the shortest decimal of their 32-bit value, which is what files hold, so
    that a configuration equals itself after a save and a load.

    Raises:
        InvalidConfig: a field breaks a rule; the message names field, value, rule and way out.
    """

    vocab_size: int = 32_000
    d_model: int = 512
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 1408
    moe_d_ff: int = 352
    num_experts: int = 8
    experts_per_token: int = 2
    moe_layers: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    shared_expert: bool = True
    max_seq_len: int = 2048
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rmsnorm_eps: float = 1e-6
    tie_embeddings: bool = True
    aux_loss_weight: float = 0.01
    router_z_loss_weight: float = 1e-3
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layers", _layer_indices(self.moe_layers))
        _check_types(self)
        _round_floats(self)
        self._check()

    def _check(self) -> None:
        positive = (
            "vocab_size", "d_model", "n_layers", "n_heads",
            "n_kv_heads", "head_dim", "d_ff", "max_seq_len",
        )  # fmt: skip
        _require_positive(self, *positive)
        if self.n_heads % self.n_kv_heads:
            raise InvalidConfig(
                f"n_heads must be a multiple of n_kv_heads, so that every key-value head serves "
                f"as many query heads; got {self.n_heads} and {self.n_kv_heads}"
            )
        if self.max_seq_len > MOST_POSITIONS or self.max_seq_len * self.head_dim > _MOST_ROTARY:
            raise InvalidConfig(
                f"max_seq_len must be at most {MOST_POSITIONS:,}, and with head_dim at most "
                f"{_MOST_ROTARY:,} numbers of the rotary table; got {self.max_seq_len:,} and "
                f"head_dim {self.head_dim:,}"
            )
        if self.head_dim % 2:
            raise InvalidConfig(
                f"head_dim must be even, because rotary embedding turns pairs of channels; "
                f"got {self.head_dim}"
            )
        for layer in self.moe_layers:
            if not 0 <= layer < self.n_layers:
                raise InvalidConfig(
                    f"moe_layers names layer {layer}, but n_layers is {self.n_layers}: "
                    f"indices run from 0 to {self.n_layers - 1}; name others, or none for a "
                    "dense model"
                )
        if self.moe_layers:
            _require_positive(self, "num_experts")
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise InvalidConfig(
                    f"experts_per_token must be from 1 to num_experts, which is "
                    f"{self.num_experts}; got {self.experts_per_token}"
                )
            _require_positive(self, "moe_d_ff")
        if self.lora is not None:
            self._check_rank(self.lora.rank)
        _require_positive(self, "rope_base", "rmsnorm_eps")
        for name in ("aux_loss_weight", "router_z_loss_weight"):
            if getattr(self, name) < 0:
                raise InvalidConfig(
                    f"{name} must not be negative, got {getattr(self, name)}; 0 switches it off"
                )

    def _check_rank(self, rank: int) -> None:
        widths = {
            "d_model": self.d_model,
            "n_heads * head_dim": self.n_heads * self.head_dim,
            "n_kv_heads * head_dim": self.n_kv_heads * self.head_dim,
            "d_ff": self.d_ff,
        }
        if self.moe_layers:
            widths["moe_d_ff"] = self.moe_d_ff
        narrowest = min(widths, key=lambda name: widths[name])
        if rank > widths[narrowest]:
            raise InvalidConfig(
                f"lora.rank must be at most the narrowest side of a projection, {narrowest}, "
                f"which is {widths[narrowest]}; got {rank}"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return layer in self.moe_layers

    def parameter_counts(self) -> ParameterCounts:
        """Parameters in all, and those one token uses (the embedding counts in both).

        Adapters do not count.
        """
        d = self.d_model
        heads, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        per_layer = 2 * d * heads + 2 * d * kv + 2 * d
        expert = 3 * d * self.moe_d_ff
        always = self.num_experts * d + (expert if self.shared_expert else 0)
        moe = sum(self.is_moe(layer) for layer in range(self.n_layers))
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        common = embeddings + d + self.n_layers * per_layer
        common += (self.n_layers - moe) * 3 * d * self.d_ff + moe * always
        return ParameterCounts(
            total=common + moe * self.num_experts * expert,
            active=common + moe * self.experts_per_token * expert,
        )


def float32(value: float) -> float:
    """The shortest decimal that reads back to the same 32-bit float as `value`."""
    if not abs(value) <= _LARGEST_FLOAT32:
        return value
    bits = struct.pack("<f", value)
    # digits of what is kept, not of what was given: 1/3 is 0.33333334 there
    value = struct.unpack("<f", bits)[0]
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) <= _LARGEST_FLOAT32 and struct.pack("<f", short) == bits:
            return short
    return float(struct.unpack("<f", bits)[0])


def _layer_indices(layers: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(sorted(set(layers)))
    except TypeError as error:
        raise InvalidConfig(
            f"moe_layers must be a list or range of layer indices, got {layers!r}"
        ) from error


class _Field(NamedTuple):
    kind: type
    words: str


_KINDS = {
    int: _Field(int, "a whole number"),
    float: _Field(float, "a finite number"),
    bool: _Field(bool, "true or false"),
}


def _check_types(config: "TransformerConfig | RopeScaling | LoraConfig") -> None:
    for field in fields(config):
        if field.type not in _KINDS:
            continue
        value = getattr(config, field.name)
        kind, words = _KINDS[field.type]
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            right = abs(value) <= _LARGEST_FLOAT32
            if right:
                value = float(value)
                object.__setattr__(config, field.name, value)
        if not right or (kind is float and not abs(value) <= _LARGEST_FLOAT32):
            raise InvalidConfig(f"{field.name} must be {words}, got {value!r}")
    if not isinstance(config, TransformerConfig):
        return
    for layer in config.moe_layers:
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise InvalidConfig(f"moe_layers must hold layer indices, got {layer!r}")
    if not isinstance(config.lora, LoraConfig | None):
        raise InvalidConfig(f"lora must be None or a LoraConfig, got {config.lora!r}")
    if not isinstance(config.rope_scaling, RopeScaling | None):
        raise InvalidConfig(
            f"rope_scaling must be None, LinearScaling or Llama3Scaling, "
            f"got {config.rope_scaling!r}"
        )


def _round_floats(config: object) -> None:
    for field in fields(config):  # type: ignore[arg-type]
        if field.type is float:
            value = getattr(config, field.name)
            object.__setattr__(config, field.name, float32(value))


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise InvalidConfig(f"{name} must be above 0, got {value}")
