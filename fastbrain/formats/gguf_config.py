"""A configuration as the keys of a GGUF file, both ways.

What the keys cannot hold, such as the weights of the auxiliary losses, is kept in a key of our own,
`fastbrain.config`, which other readers pass over. A setting that we do not know is refused by name:
each of them changes what the model computes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.gguf_header import Header
from fastbrain.formats.gguf_keys import Keys
from fastbrain.formats.gguf_layout import (
    ERNIE_MOE,
    LLAMA,
    LLAMA_CPP_EXPERTS,
    LLAMA_CPP_LAYERS,
    architecture,
)
from fastbrain.formats.gguf_rope import divides, linear_scaling, recognized
from fastbrain.formats.header import config_from_object, config_object
from fastbrain.formats.strict_json import dumps, loads, short

OWN_KEY = "fastbrain.config"
_LEAST_TENSORS = 9  # of a block

_FIELDS = {
    "block_count": "n_layers",
    "context_length": "max_seq_len",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rmsnorm_eps",
    "rope.freq_base": "rope_base",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
_MOE_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "experts_per_token",
    "expert_feed_forward_length": "moe_d_ff",
    "expert_shared_feed_forward_length": "moe_d_ff",
}
# of a dense model only our own key holds these
_MOE_ONLY = ("moe_d_ff", "num_experts", "experts_per_token", "shared_expert")


def config_keys(config: TransformerConfig) -> dict[str, Any]:
    """The keys that describe a model, in the order of our files.

    Raises:
        InvalidConfig: no architecture of llama.cpp's computes this model.
    """
    if config.n_layers > LLAMA_CPP_LAYERS:
        raise InvalidConfig(
            f"n_layers is {config.n_layers}; llama.cpp takes {LLAMA_CPP_LAYERS} at most"
        )
    arch = architecture(config)
    fields = dict(_FIELDS)
    own: dict[str, Any] = {}
    if config.moe_layers:
        _check_moe(config)
        fields |= _MOE_FIELDS
        own = {
            "expert_shared_count": 1,
            "leading_dense_block_count": min(config.moe_layers),
            "interleave_moe_layer_step": 1,
        }
    if isinstance(config.rope_scaling, LinearScaling):
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    keys = {key: getattr(config, name) for key, name in fields.items()} | own
    return {f"{arch}.{key}": value for key, value in keys.items()} | {
        OWN_KEY: dumps(config_object(config))
    }


def read_config(header: Header, factors: Tensor | None) -> TransformerConfig:
    """The configuration that a file's keys, and the presence of its tensors, describe.

    Args:
        factors: what the rotary frequencies are divided by, (K/2), if the file has them.

    Raises:
        InvalidConfig: a setting that fastbrain does not have; names it.
        InvalidSnapshot: a key is missing, or keys and tensors do not agree.
    """
    values = header.values
    kind = values.get("general.type", "model")
    if kind != "model":
        raise InvalidConfig(f"general.type is {short(kind)}: this is no model to import")
    if values.get("split.count", 1) != 1:
        raise InvalidConfig(
            "split.count says that this is one of several files; join them with "
            "`llama-gguf-split --merge`"
        )
    arch = values.get("general.architecture")
    if arch not in (LLAMA, ERNIE_MOE):
        raise InvalidConfig(
            f"general.architecture is {short(arch)}; fastbrain imports {LLAMA} and {ERNIE_MOE}"
        )
    keys = Keys(arch, values)
    if arch == LLAMA:
        # with experts this would be a Mixtral
        keys.same("expert_count", 0, f"dense models of this kind, and mixtures of {ERNIE_MOE}")
        keys.same("expert_used_count", 0, "dense models of this kind")
    fields = _fields(keys, header)
    if arch == ERNIE_MOE:
        fields |= _moe_fields(keys, fields["n_layers"])
    scaling = linear_scaling(keys)
    keys.refuse_others()
    found = TransformerConfig(**fields, rope_scaling=scaling)
    own = _own(values)
    if own is not None:
        _check_own(found, own, factors)
        return own
    if factors is None:
        return found
    return replace(found, rope_scaling=recognized(found, factors))


def _fields(keys: Keys, header: Header) -> dict[str, Any]:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidSnapshot("the file has no matrix token_embd.weight")
    n_layers = keys.whole("block_count")
    if n_layers > LLAMA_CPP_LAYERS:
        raise InvalidConfig(
            f"block_count is {n_layers}; fastbrain takes {LLAMA_CPP_LAYERS} at most"
        )
    if n_layers * _LEAST_TENSORS > len(header.tensors):
        raise InvalidSnapshot(
            f"block_count is {n_layers}, but the file's {len(header.tensors)} tensors are too few "
            "for that; it is damaged"
        )
    d_model, n_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = keys.whole("attention.key_length", d_model // max(1, n_heads))
    keys.same("attention.value_length", head_dim, "the width of keys")
    keys.same("rope.dimension_count", head_dim, "rotation of whole heads")
    vocab_size = embedding.shape[0]
    keys.same("vocab_size", vocab_size, "as many as token_embd.weight has rows")
    return {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": keys.whole("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": keys.whole("feed_forward_length"),
        "moe_layers": (),
        "max_seq_len": keys.whole("context_length"),
        "rope_base": keys.number("rope.freq_base", 10_000.0),
        "rmsnorm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": "output.weight" not in header.tensors,
    }


def _moe_fields(keys: Keys, n_layers: int) -> dict[str, Any]:
    num_experts = keys.whole("expert_count")
    if num_experts > LLAMA_CPP_EXPERTS:
        raise InvalidConfig(
            f"expert_count is {num_experts}; fastbrain takes {LLAMA_CPP_EXPERTS} at most"
        )
    moe_d_ff = keys.whole("expert_feed_forward_length")
    keys.same("expert_shared_count", 1, "one shared expert")
    keys.same("expert_shared_feed_forward_length", moe_d_ff, "one as wide as the others")
    keys.same("interleave_moe_layer_step", 1, "a mixture in every layer after the dense ones")
    first = keys.whole("leading_dense_block_count", 0)
    if first >= n_layers:
        raise InvalidSnapshot(
            f"leading_dense_block_count is {first}, but there are only {n_layers} layers"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": keys.whole("expert_used_count"),
        "moe_d_ff": moe_d_ff,
        "moe_layers": tuple(range(first, n_layers)),
        "shared_expert": True,
    }


def _own(values: Mapping[str, Any]) -> TransformerConfig | None:
    text = values.get(OWN_KEY)
    if text is None:
        return None
    if not isinstance(text, str):
        raise Serde(f"{OWN_KEY} must be a text, not {short(text)}")
    return config_from_object(loads(text.encode()))


def _check_own(found: TransformerConfig, own: TransformerConfig, factors: Tensor | None) -> None:
    """Refuse the file if our own key tells of another model."""
    kept = {"aux_loss_weight", "router_z_loss_weight"}
    if not found.moe_layers:
        kept |= set(_MOE_ONLY)
    if isinstance(own.rope_scaling, Llama3Scaling) and divides(own, own.rope_scaling, factors):
        kept.add("rope_scaling")
        factors = None
    if replace(found, **{name: getattr(own, name) for name in kept}) != own or factors is not None:
        raise InvalidSnapshot(
            f"{OWN_KEY} describes another model than the file's other keys; the file was changed"
        )


def _check_moe(config: TransformerConfig) -> None:
    way_out = "fastbrain export hf --arch qwen2_moe takes it"
    first = min(config.moe_layers)
    if config.moe_layers != tuple(range(first, config.n_layers)):
        raise InvalidConfig(
            f"moe_layers is {list(config.moe_layers)}; a GGUF file has every layer from some "
            f"index to the last as a mixture of experts; {way_out}"
        )
    if not config.shared_expert:
        raise InvalidConfig(
            f"shared_expert is false; a mixture of experts in a GGUF file has one; {way_out}"
        )
    if config.num_experts > LLAMA_CPP_EXPERTS:
        raise InvalidConfig(
            f"num_experts is {config.num_experts}; llama.cpp takes {LLAMA_CPP_EXPERTS} at most; "
            f"{way_out}"
        )
    if isinstance(config.rope_scaling, Llama3Scaling):
        raise InvalidConfig(
            "rope_scaling is Llama 3's, which llama.cpp does not apply to mixtures of experts of "
            f"this kind; {way_out}"
        )
