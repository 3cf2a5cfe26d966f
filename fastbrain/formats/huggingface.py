"""Checkpoint directories as Hugging Face reads them: configuration files, and tensors by name.

A dense directory loads in transformers as it is. One of a mixture of experts, or with adapters
beside the weights, carries a `model_type` of our own, which transformers refuses by name, because
the nearest of its classes would compute something else without a word. Every config.json also holds
our own configuration, under `fastbrain`, so that nothing is inferred.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig
from fastbrain.formats.header import config_object
from fastbrain.formats.safetensors_file import (
    check_fits,
    check_safetensors_header,
    copy_tensors,
    read_tensors,
    write_tensors,
)
from fastbrain.tokens.tokenizer_files import TokenizerFiles

__all__ = [
    "check_fits",
    "check_safetensors_header",
    "config_json",
    "copy_tensors",
    "documents",
    "generation_config_json",
    "json_bytes",
    "read_tensors",
    "stored",
    "tokenizer_config_json",
    "write_tensors",
]


def config_json(
    config: TransformerConfig,
    *,
    dtype: str = "float32",
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
) -> dict[str, Any]:
    """The config.json of a training checkpoint.

    Args:
        dtype: what the weights beside it are in, as torch spells it.
        eos: the id or ids that end a text.
        pad: the id that fills a batch.

    A dense model is a `llama`. A mixture of experts has `model_type` `fastbrain_moe` and the key
    names of `ernie4_5_moe`; the first and last MoE layer are given when the layers between them are
    all MoE, and otherwise only the `fastbrain` key says which they are.
    """
    common = {
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rmsnorm_eps,
        "rope_parameters": _rope_parameters(config),
        "rope_theta": config.rope_base,  # where version 4 of transformers looks
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": _ids(eos),
        "pad_token_id": pad,
        "dtype": dtype,
    }
    own = _moe_keys(config) if config.moe_layers else _llama_keys()
    if config.lora is not None:
        # a class that passed over the adapters would answer as if nothing had been trained
        own |= {"architectures": ["FastbrainLoraForCausalLM"], "model_type": "fastbrain_lora"}
    return {**own, **common, "fastbrain": config_object(config)}


def generation_config_json(eos: int | Sequence[int] | None, pad: int | None) -> dict[str, Any]:
    """The generation_config.json beside it: the ids that end a text, always as a list, and pad."""
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    return {"eos_token_id": ids or None, "pad_token_id": pad}


def tokenizer_config_json(
    *, eos: str, pad: str, model_max_length: int, chat_template: str | None = None
) -> dict[str, Any]:
    """The tokenizer_config.json beside it.

    Args:
        eos: the token that ends a text, as text.
        pad: the token that fills a batch, as text.
        model_max_length: positions that the model has.
        chat_template: Jinja text that renders a conversation.
    """
    found: dict[str, Any] = {
        # without the class, some model types get another tokenizer and other ids, without a word
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    return found | ({"chat_template": chat_template} if chat_template is not None else {})


def documents(
    config: Mapping[str, Any], files: TokenizerFiles | None, model_max_length: int
) -> dict[str, bytes]:
    """The JSON files of a model's directory, by name.

    Args:
        config: of `config_json`; its special ids become those of the tokenizer.
        files: the tokenizer, which brings two files of its own.
        model_max_length: positions that the model has.
    """
    if files is None:
        return {
            "config.json": json_bytes(config),
            "generation_config.json": json_bytes(generation_config_json(None, None)),
        }
    ends = list(files.ends)
    ids = {"eos_token_id": ends[0] if len(ends) == 1 else ends, "pad_token_id": files.pad_id}
    begin = {}
    words = tokenizer_config_json(
        eos=files.eos,
        pad=files.pad,
        model_max_length=model_max_length,
        chat_template=files.chat_template,
    )
    if files.bos is not None:
        begin = {"bos_token_id": files.tokenizer.token_to_id(files.bos)}
        words["bos_token"] = files.bos
    return {
        "config.json": json_bytes({**config, **ids, **begin}),
        "generation_config.json": json_bytes(generation_config_json(ends, files.pad_id) | begin),
        "tokenizer_config.json": json_bytes(words),
        "tokenizer.json": files.tokenizer.to_str(pretty=True).encode(),
    }


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """The bytes of a file with this object."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def stored(views: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by name in the shapes that Hugging Face stores: norm weights (1, D) become (D).

    The results alias the views, so `write_tensors` and `read_tensors` take them both.
    """
    return {name: view[0] if name.endswith("norm.weight") else view for name, view in views}


def _llama_keys() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _moe_keys(config: TransformerConfig) -> dict[str, Any]:
    first, last = min(config.moe_layers), max(config.moe_layers)
    keys: dict[str, Any] = {
        "architectures": ["FastbrainMoeForCausalLM"],
        "model_type": "fastbrain_moe",
        "use_bias": False,
        "moe_intermediate_size": config.moe_d_ff,
        "moe_num_experts": config.num_experts,
        "moe_k": config.experts_per_token,
        "moe_num_shared_experts": int(config.shared_expert),
        "moe_norm_min": 1e-12,
    }
    if set(config.moe_layers) == set(range(first, last + 1)):
        keys |= {
            "moe_layer_start_index": first,
            "moe_layer_end_index": last,
            "moe_layer_interval": 1,
        }
    return keys


def _rope_parameters(config: TransformerConfig) -> dict[str, Any]:
    theta = {"rope_theta": config.rope_base}
    match config.rope_scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor, **theta}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3", **vars(scaling), **theta}
        case None:
            return {"rope_type": "default", **theta}


def _ids(eos: int | Sequence[int] | None) -> int | list[int] | None:
    return eos if isinstance(eos, int | None) else list(eos)
