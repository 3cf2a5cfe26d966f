"""What a checkpoint directory says of its model to Hugging Face, and to us."""

import json

import pytest
import torch

from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig
from fastbrain.formats import header, huggingface
from fastbrain.transformer import pieces

DENSE = TransformerConfig(
    vocab_size=61,
    d_model=48,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=96,
    moe_layers=(),
    max_seq_len=64,
)
ERNIE = {
    "model_type": "fastbrain_moe",
    "use_bias": False,
    "moe_intermediate_size": 352,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 2,
    "moe_layer_end_index": 7,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}


def test_a_dense_configuration_is_a_llama():
    found = huggingface.config_json(DENSE, eos=[0, 3], pad=1)
    assert found == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": [0, 3],
        "pad_token_id": 1,
        "dtype": "float32",
        "fastbrain": header.config_object(DENSE),
    }


def test_a_mixture_of_experts_has_a_type_of_its_own_and_the_names_of_ernie():
    found = huggingface.config_json(TransformerConfig(), dtype="bfloat16")
    assert found.items() >= ERNIE.items()
    assert found["dtype"] == "bfloat16"
    assert found["eos_token_id"] is None


def test_scattered_moe_layers_are_left_to_our_own_key():
    found = huggingface.config_json(TransformerConfig(moe_layers=(1, 3), shared_expert=False))
    assert not [key for key in found if key.startswith("moe_layer_")]
    assert found["moe_num_shared_experts"] == 0
    assert found["fastbrain"]["moe_layers"] == [1, 3]


@pytest.mark.parametrize("scaling", [None, LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 32)])
def test_our_own_key_gives_the_configuration_back(scaling):
    config = TransformerConfig(rope_scaling=scaling, rope_base=5e5, rmsnorm_eps=1e-7)
    text = json.dumps(huggingface.config_json(config))
    assert header.config_from_object(json.loads(text)["fastbrain"]) == config


def test_rope_scaling_is_among_the_rope_parameters():
    linear = huggingface.config_json(TransformerConfig(rope_scaling=LinearScaling(4.0)))
    assert linear["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 4.0,
        "rope_theta": 10000.0,
    }
    llama3 = huggingface.config_json(TransformerConfig(rope_scaling=Llama3Scaling(8, 1, 4, 32)))
    assert llama3["rope_parameters"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }


def test_the_files_beside_it():
    assert huggingface.generation_config_json(0, 1) == {"eos_token_id": [0], "pad_token_id": 1}
    assert huggingface.generation_config_json((0, 3), None) == {
        "eos_token_id": [0, 3],
        "pad_token_id": None,
    }
    assert huggingface.generation_config_json(None, None)["eos_token_id"] is None
    plain = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "model_max_length": 64,
        "clean_up_tokenization_spaces": False,
    }
    words = {"eos": "<|endoftext|>", "pad": "<|pad|>", "model_max_length": 64}
    assert huggingface.tokenizer_config_json(**words) == plain
    assert huggingface.tokenizer_config_json(**words, chat_template="{{ x }}") == plain | {
        "chat_template": "{{ x }}"
    }


def test_norm_weights_are_stored_as_vectors_and_a_router_of_one_expert_is_not():
    config = TransformerConfig(n_layers=1, moe_layers=(0,), num_experts=1, experts_per_token=1)
    views = [(p.name, torch.zeros(p.rows, p.cols)) for p in pieces(config)]
    stored = huggingface.stored(views)
    vectors = {name for name, tensor in stored.items() if tensor.ndim == 1}
    assert vectors == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }
    assert stored["model.layers.0.mlp.gate.weight"].shape == (1, 512)
    stored["model.norm.weight"][3] = 1  # an alias, not a copy
    assert views[-1][1][0, 3] == 1


def test_transformers_builds_the_same_shapes_from_a_dense_configuration():
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    config = transformers.LlamaConfig.from_dict(
        json.loads(json.dumps(huggingface.config_json(DENSE)))
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ours = [(p.name, torch.zeros(p.rows, p.cols, device="meta")) for p in pieces(DENSE)]
    assert theirs == {n: tuple(t.shape) for n, t in huggingface.stored(ours).items()}
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.fastbrain == header.config_object(DENSE)
