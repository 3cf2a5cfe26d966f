"""What a config.json of transformers says of a model, in our own terms, or why we cannot run it.

A setting that would change what the model computes is refused by name and value; what is absent
means what transformers takes it to mean. Files of its versions 4 and 5 are read alike.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastbrain.config import TransformerConfig, float32
from fastbrain.errors import InvalidConfig, Serde
from fastbrain.formats import hf_layout as layouts
from fastbrain.formats.header import config_from_object, integer
from fastbrain.formats.hf_rope import rope
from fastbrain.formats.strict_json import short

Settings = Mapping[str, Any]

# more than any model has, and few enough to be listed one by one
_MOST_LAYERS = 10_000

# what transformers takes an absent key to mean, where that depends on the class
_ABSENT: Mapping[str, Settings] = {
    layouts.LLAMA: {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
    layouts.ERNIE: {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
    layouts.QWEN2: {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "qkv_bias": True,
        "norm_topk_prob": False,
    },
    layouts.OWN_MOE: {},
    layouts.OWN_LORA: {},
}

_NO_BIAS = "fastbrain has no biases"
_NO_QK_NORM = "fastbrain does not normalize queries and keys"
_ALL_POSITIONS = "in fastbrain every position attends to all before it"


class _Rule(NamedTuple):
    """The values of a setting that we can hold, and why no others."""

    accepted: tuple[Any, ...]
    why: str


_RULES = {
    "hidden_act": _Rule(("silu",), "fastbrain has no other than silu"),
    "attention_bias": _Rule((False, None), _NO_BIAS),
    "mlp_bias": _Rule((False, None), _NO_BIAS),
    "use_bias": _Rule((False, None), _NO_BIAS),
    "qkv_bias": _Rule((False, None), _NO_BIAS),
    "use_qk_norm": _Rule((False, None), _NO_QK_NORM),
    "qk_norm": _Rule((False, None), _NO_QK_NORM),
    "use_sliding_window": _Rule((False, None), _ALL_POSITIONS),
    "is_causal": _Rule((True, None), "fastbrain takes causal models only"),
    "partial_rotary_factor": _Rule((1, 1.0, None), "fastbrain turns all of a head's channels"),
    "quantization_config": _Rule(
        (None,), "fastbrain reads F32, F16 and BF16 weights: take the model as it was before"
    ),
    "norm_topk_prob": _Rule((True,), "fastbrain's gates add up to 1"),
    "decoder_sparse_step": _Rule((1,), "name the dense layers in mlp_only_layers instead"),
    "moe_layer_interval": _Rule((1,), "its experts must be in a range of layers without gaps"),
    "moe_num_shared_experts": _Rule((0, 1), "fastbrain has one shared expert or none"),
}

_INTEGERS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
_ERNIE_INTEGERS = {
    "moe_d_ff": "moe_intermediate_size",
    "num_experts": "moe_num_experts",
    "experts_per_token": "moe_k",
}
_QWEN2_INTEGERS = {
    "moe_d_ff": "moe_intermediate_size",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
}


class Field(NamedTuple):
    """A value for a field of ours, and the key that it comes from."""

    value: Any
    key: str


class Described(NamedTuple):
    """A model as config.json describes it: its shape and the class that its tensors are of."""

    config: TransformerConfig
    arch: str


def described(settings: Any) -> Described:
    """What model a parsed config.json describes.

    Where there is a `fastbrain` key it is the configuration, and the other keys must agree.

    Raises:
        InvalidConfig: a setting that we lack, or two that contradict each other; names them.
        Serde: a key is missing or of the wrong type.
    """
    if not isinstance(settings, dict):
        raise Serde(f"there must be an object, not {short(settings)}")
    arch = settings.get("model_type")
    if not isinstance(arch, str) or arch not in layouts.READ:
        raise InvalidConfig(
            f"model_type is {short(arch)}, which fastbrain cannot run; it reads "
            f"{', '.join(layouts.READ)}"
        )
    absent = _ABSENT[arch]
    _refuse_unsupported({**absent, **settings}, arch)
    fields = _fields(settings, absent, arch)
    if settings.get("fastbrain") is not None:
        config = config_from_object(settings["fastbrain"])
        _require_agreement(config, fields)
        return Described(config, arch)
    if arch in (layouts.OWN_MOE, layouts.OWN_LORA):
        raise Serde(f"the key fastbrain is missing, which says what a {arch} is")
    values = {name: field.value for name, field in fields.items()}
    if arch == layouts.QWEN2:
        # that class always has one; where it adds nothing, its matrices are zero
        values["shared_expert"] = True
    return Described(TransformerConfig(**values), arch)


def _refuse_unsupported(settings: Settings, arch: str) -> None:
    for key, rule in _RULES.items():
        if key == "norm_topk_prob" and arch != layouts.QWEN2:
            continue
        value = settings.get(key, rule.accepted[0])
        if not any(type(value) is type(each) and value == each for each in rule.accepted):
            raise InvalidConfig(f"{key} is {short(value)}; {rule.why}")
    window = settings.get("sliding_window")
    # that class gives a width also where it is not used
    used = arch != layouts.QWEN2 and settings.get("use_sliding_window") is not False
    if used and window not in (None, 0):
        raise InvalidConfig(f"sliding_window is {short(window)}; {_ALL_POSITIONS}")
    kinds = settings.get("layer_types") or []
    if not isinstance(kinds, list):
        raise Serde(f"layer_types must be a list, not {short(kinds)}")
    other = [each for each in kinds if each != "full_attention"]
    if other:
        raise InvalidConfig(f"layer_types names {short(other[0])}; {_ALL_POSITIONS}")


def _fields(settings: Settings, absent: Settings, arch: str) -> dict[str, Field]:
    """Every field that the keys of transformers decide."""
    found = {field: _integer(settings, key) for field, key in _INTEGERS.items()}
    d, layers, heads = (found[name].value for name in ("d_model", "n_layers", "n_heads"))
    if layers > _MOST_LAYERS:
        raise InvalidConfig(f"num_hidden_layers is {layers}; at most {_MOST_LAYERS} can be read")
    kv = settings.get("num_key_value_heads")
    if kv is None:
        found["n_kv_heads"] = Field(heads, "num_attention_heads")
    else:
        found["n_kv_heads"] = _integer(settings, "num_key_value_heads")
    if settings.get("head_dim") is None:
        if not heads or d % heads:
            raise InvalidConfig(
                f"head_dim is absent, and hidden_size {d} is no multiple of num_attention_heads "
                f"{heads}"
            )
        found["head_dim"] = Field(d // heads, "hidden_size / num_attention_heads")
    else:
        found["head_dim"] = _integer(settings, "head_dim")
    found["rmsnorm_eps"] = _number(settings, absent, "rms_norm_eps")
    tied = settings.get("tie_word_embeddings", absent.get("tie_word_embeddings"))
    if type(tied) is not bool:
        raise Serde(f"tie_word_embeddings must be true or false, not {short(tied)}")
    found["tie_embeddings"] = Field(tied, "tie_word_embeddings")
    theta, scaling, place = rope(settings, absent.get("rope_theta"))
    found["rope_base"] = Field(theta, "rope_theta")
    found["rope_scaling"] = Field(scaling, place)
    return found | _moe_fields(settings, absent, arch, layers)


def _moe_fields(settings: Settings, absent: Settings, arch: str, layers: int) -> dict[str, Field]:
    if arch == layouts.LLAMA:
        return {"moe_layers": Field((), "model_type")}
    if arch == layouts.QWEN2:
        return _qwen2_fields(settings, layers)
    if arch == layouts.OWN_LORA and "moe_num_experts" not in settings:
        return {"moe_layers": Field((), "model_type")}
    found = {field: _integer(settings, key) for field, key in _ERNIE_INTEGERS.items()}
    shared = settings.get("moe_num_shared_experts", absent.get("moe_num_shared_experts"))
    found["shared_expert"] = Field(shared == 1, "moe_num_shared_experts")
    least = settings.get("moe_norm_min", 0.0)
    if type(least) not in (int, float) or least * found["num_experts"].value > 1:
        raise InvalidConfig(
            f"moe_norm_min is {short(least)}; fastbrain has no lower bound on what gates are "
            "divided by, and this one would be met"
        )
    if arch == layouts.ERNIE or "moe_layer_start_index" in settings:
        first, last = (
            _index(settings, absent, key, layers)
            for key in ("moe_layer_start_index", "moe_layer_end_index")
        )
        named = tuple(range(first, min(last + 1, layers)))
        found["moe_layers"] = Field(named, "moe_layer_start_index and moe_layer_end_index")
    return found


def _qwen2_fields(settings: Settings, layers: int) -> dict[str, Field]:
    found = {field: _integer(settings, key) for field, key in _QWEN2_INTEGERS.items()}
    shared = _integer(settings, "shared_expert_intermediate_size")
    width = found["moe_d_ff"].value
    if shared.value != width:
        raise InvalidConfig(
            f"shared_expert_intermediate_size is {shared.value} and moe_intermediate_size {width}; "
            "in fastbrain the shared expert is as wide as the others"
        )
    dense = settings.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise Serde(f"mlp_only_layers must be a list of whole numbers, not {short(dense)}")
    without = {integer(each, "mlp_only_layers") for each in dense}
    named = tuple(layer for layer in range(layers) if layer not in without)
    return found | {"moe_layers": Field(named, "mlp_only_layers")}


def _require_agreement(config: TransformerConfig, fields: Mapping[str, Field]) -> None:
    for name, (value, key) in fields.items():
        if not config.moe_layers and name in (*_ERNIE_INTEGERS, "shared_expert"):
            continue
        ours = getattr(config, name)
        if ours != (float32(value) if isinstance(value, float) else value):
            raise InvalidConfig(
                f"{key} gives {short(value)}, but {name} in the fastbrain key is {short(ours)}; "
                "one of the two was changed: make them agree, or remove the fastbrain key"
            )


def _integer(settings: Settings, key: str) -> Field:
    if key not in settings:
        raise Serde(f"the key {key} is missing")
    return Field(integer(settings[key], key), key)


def _number(settings: Settings, absent: Settings, key: str) -> Field:
    value = settings.get(key, absent.get(key))
    if type(value) not in (int, float) or not abs(value) < 1e38:
        raise Serde(f"{key} must be a finite number, not {short(value)}")
    return Field(float(value), key)


def _index(settings: Settings, absent: Settings, key: str, layers: int) -> int:
    value = settings.get(key, absent.get(key))
    if value == -1 and key == "moe_layer_end_index":
        return layers - 1
    return integer(value, key)
