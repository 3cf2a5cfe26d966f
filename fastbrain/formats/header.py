"""The JSON that describes a model: its configuration and its optimizer, key by key.

The crate's reader wants every key, integers without a point, and no key twice, and its writer has
a fixed order and spelling; so there is one table of keys here, in file order, and both directions
follow it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastbrain.config import (
    LinearScaling,
    Llama3Scaling,
    LoraConfig,
    RopeScaling,
    TransformerConfig,
)
from fastbrain.errors import InvalidConfig, Serde
from fastbrain.formats.strict_json import dumps, float32, short
from fastbrain.optim import Adam, Lion, Optimizer, Sgd

__all__ = [
    "config_from_object",
    "config_object",
    "dumps",
    "integer",
    "lora_from_object",
    "lora_object",
    "optimizer_from_object",
    "optimizer_object",
]

Reader = Callable[[Any, str], Any]


def config_object(config: TransformerConfig) -> dict[str, Any]:
    """A configuration as the `config` object of a header, keys in file order."""
    values: dict[str, Any] = {
        **{name: getattr(config, name) for name in _CONFIG if name not in _ABSENT},
        "moe_layers": list(config.moe_layers),
        "causal": True,
        "lora": None if config.lora is None else lora_object(config.lora),
    }
    if config.rope_scaling is not None:
        values["rope_scaling"] = _scaling_object(config.rope_scaling)
    return {name: values[name] for name in _CONFIG if name in values}


def config_from_object(value: Any) -> TransformerConfig:
    """The configuration that a `config` object describes.

    Raises:
        Serde: a key is missing or of the wrong type; names it.
        InvalidConfig: a value breaks a rule, or asks for what fastbrain does not have.
    """
    fields = _read(value, "config", _CONFIG, optional=_ABSENT)
    if fields.pop("causal", True) is False:
        raise InvalidConfig(
            "config.causal is false: this is a bidirectional model, which fastbrain cannot run; "
            "it takes causal models only"
        )
    return TransformerConfig(**fields)


def lora_object(lora: LoraConfig) -> dict[str, Any]:
    """Adapter settings as the `lora` object of a header."""
    return {name: getattr(lora, name) for name in _LORA}


def lora_from_object(value: Any, where: str = "lora") -> LoraConfig:
    """The adapter settings that a `lora` object describes.

    Raises:
        Serde: a key is missing or of the wrong type; names it.
        InvalidConfig: a value breaks a rule.
    """
    return LoraConfig(**_read(value, where, _LORA))


def optimizer_object(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer as the `optimizer` object of a header: one key, which names the kind.

    `decay_vectors` has no place in the file; a reader takes it as True.
    """
    values: tuple[float, ...]
    match optimizer:
        case Adam():
            values = (*optimizer.betas, optimizer.eps, optimizer.weight_decay)
        case Lion():
            values = (*optimizer.betas, optimizer.weight_decay)
        case Sgd():
            values = ()
        case _:
            raise InvalidConfig(
                f"a {type(optimizer).__name__} cannot be saved; a file holds Adam, Lion or Sgd"
            )
    kind = type(optimizer).__name__
    settings = [float(each) for each in (optimizer.learning_rate, *values)]
    return {kind: dict(zip(_OPTIMIZERS[kind], settings, strict=True))}


def optimizer_from_object(value: Any) -> Optimizer:
    """The optimizer that an `optimizer` object describes.

    Raises:
        Serde: not one known kind, or a key is missing or of the wrong type.
        InvalidConfig: a setting is outside its range.
    """
    if not isinstance(value, dict) or len(value) != 1:
        raise Serde(f'optimizer must be an object with one key, such as "Adam", not {short(value)}')
    [(kind, settings)] = value.items()
    if kind not in _OPTIMIZERS:
        raise Serde(f"optimizer is {short(kind)}; known are {', '.join(_OPTIMIZERS)}")
    optional = {"weight_decay"} if kind == "Adam" else set()
    got = _read(settings, f"optimizer.{kind}", _OPTIMIZERS[kind], optional)
    rate = got["learning_rate"]
    if kind == "Sgd":
        return Optimizer.sgd(rate)
    betas, decay = (got["beta1"], got["beta2"]), got.get("weight_decay", 0.0)
    if kind == "Lion":
        return Optimizer.lion(rate, betas=betas, weight_decay=decay)
    return Optimizer.adam(rate, betas=betas, eps=got["epsilon"], weight_decay=decay)


def integer(value: Any, where: str) -> int:
    """A whole number from 0 to 2^63 - 1, spelled without a point."""
    if not _is_whole(value):
        raise Serde(f"{where} must be a whole number below 2^63, such as 128, not {short(value)}")
    return int(value)


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise Serde(f"{where} must be a number, not {short(value)}")
    return float(np.format_float_scientific(float32(value, where, Serde)))


def _boolean(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise Serde(f"{where} must be true or false, not {short(value)}")
    return value


def _integers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Serde(f"{where} must be a list of whole numbers, not {short(value)}")
    for i, entry in enumerate(value):
        if not _is_whole(entry):
            integer(entry, f"{where}[{i}]")
    return tuple(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _scaling(value: Any, where: str) -> RopeScaling | None:
    if value is None:
        return None
    kind = value.get("rope_type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = " or ".join(_SCALINGS)
        raise Serde(f"{where} must be null or have rope_type {known}, not {short(value)}")
    make, keys = _SCALINGS[kind]
    return make(**_read(value, where, keys))


def _scaling_object(scaling: RopeScaling) -> dict[str, Any]:
    kind = "linear" if isinstance(scaling, LinearScaling) else "llama3"
    return {"rope_type": kind} | {name: getattr(scaling, name) for name in _SCALINGS[kind][1]}


def _lora(value: Any, where: str) -> LoraConfig | None:
    return None if value is None else lora_from_object(value, where)


_SCALINGS: dict[str, tuple[Callable[..., RopeScaling], dict[str, Reader]]] = {
    "linear": (LinearScaling, {"factor": _number}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": _number,
            "low_freq_factor": _number,
            "high_freq_factor": _number,
            "original_max_position_embeddings": integer,
        },
    ),
}

_LORA: dict[str, Reader] = {"rank": integer, "alpha": _number, "seed": integer}

_CONFIG: dict[str, Reader] = {
    "vocab_size": integer,
    "d_model": integer,
    "n_layers": integer,
    "n_heads": integer,
    "n_kv_heads": integer,
    "head_dim": integer,
    "d_ff": integer,
    "moe_d_ff": integer,
    "num_experts": integer,
    "experts_per_token": integer,
    "moe_layers": _integers,
    "shared_expert": _boolean,
    "max_seq_len": integer,
    "rope_base": _number,
    "rope_scaling": _scaling,
    "rmsnorm_eps": _number,
    "tie_embeddings": _boolean,
    "causal": _boolean,
    "aux_loss_weight": _number,
    "router_z_loss_weight": _number,
    "lora": _lora,
}
_ABSENT = {"rope_scaling", "causal", "lora"}  # what a file may leave out

_OPTIMIZERS: dict[str, dict[str, Reader]] = {
    "Adam": dict.fromkeys(("learning_rate", "beta1", "beta2", "epsilon", "weight_decay"), _number),
    "Sgd": {"learning_rate": _number},
    "Lion": dict.fromkeys(("learning_rate", "beta1", "beta2", "weight_decay"), _number),
}


def _read(
    value: Any, where: str, readers: Mapping[str, Reader], optional: set[str] | None = None
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Serde(f"{where} must be an object, not {short(value)}")
    missing = [name for name in readers if name not in value and name not in (optional or ())]
    if missing:
        raise Serde(f"{where} lacks the key {missing[0]}")
    return {
        name: read(value[name], f"{where}.{name}")
        for name, read in readers.items()
        if name in value
    }
