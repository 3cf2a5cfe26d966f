"""The config.json of an exported model: a training checkpoint's, in the words of its class."""

from typing import Any

from fastbrain.config import TransformerConfig
from fastbrain.formats import hf_layout as layouts
from fastbrain.formats.huggingface import config_json

_CLASSES = {
    layouts.LLAMA: "LlamaForCausalLM",
    layouts.ERNIE: "Ernie4_5_MoeForCausalLM",
    layouts.QWEN2: "Qwen2MoeForCausalLM",
}


def export_config(config: TransformerConfig, arch: str, *, dtype: str) -> dict[str, Any]:
    """The config.json of a model as this class of transformers.

    Args:
        arch: a `model_type` that can hold the model; that of a checkpoint is left as it is.
        dtype: what the weights beside it are in, as torch spells it.
    """
    found = config_json(config, dtype=dtype)
    if arch == layouts.QWEN2:
        ernie = [key for key in found if key.startswith("moe_") or key == "use_bias"]
        found = {key: value for key, value in found.items() if key not in ernie}
        found |= _qwen2_keys(config)
    if config.rope_scaling is not None:
        # where version 4 of transformers looks
        rope = dict(found["rope_parameters"])
        del rope["rope_theta"]
        found["rope_scaling"] = rope
    if arch in _CLASSES:
        found |= {"architectures": [_CLASSES[arch]], "model_type": arch}
    return found


def _qwen2_keys(config: TransformerConfig) -> dict[str, Any]:
    return {
        "qkv_bias": False,
        "moe_intermediate_size": config.moe_d_ff,
        "shared_expert_intermediate_size": config.moe_d_ff,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        # the class divides the gates by their sum only if it is told to
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.n_layers) if not config.is_moe(i)],
        "use_sliding_window": False,
        "output_router_logits": False,
    }
