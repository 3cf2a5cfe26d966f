"""What an exported directory holds, and what is refused before one is written."""

import dataclasses
import json
import weakref

import pytest
import torch
from hf_directories import MODELS, exported, imported, settings
from models import DENSE, MOE, model
from safetensors import safe_open
from safetensors.torch import load_file
from texts import small_tokenizer

from fastbrain import TransformerConfig, TransformerLm
from fastbrain.config import LoraConfig
from fastbrain.errors import InvalidConfig
from fastbrain.formats import header, hf_export, hf_layout
from fastbrain.formats.hf_export import write_directory
from fastbrain.tokens.tokenizer_files import TokenizerFiles

SHARED = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 37,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "qkv_bias": False,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "use_sliding_window": False,
    "output_router_logits": False,
}
ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "use_bias": False,
    "moe_intermediate_size": 12,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_norm_min": 1e-12,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 1,
}


def files(**changes):
    words = {"eos": "<|endoftext|>", "pad": "<|pad|>"} | changes
    return TokenizerFiles(small_tokenizer(), **words)


@pytest.mark.parametrize(("arch", "own"), [("auto", ERNIE), ("qwen2_moe", QWEN2)])
def test_a_mixture_of_experts_is_described_as_its_class_wants_it(tmp_path, arch, own):
    exported(tmp_path / "out", MOE, arch=arch)
    assert settings(tmp_path / "out") == {
        **own,
        **SHARED,
        "fastbrain": header.config_object(MOE),
    }


def test_a_dense_model_is_a_llama(tmp_path):
    exported(tmp_path / "out", DENSE)
    assert settings(tmp_path / "out") == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        **SHARED,
        "fastbrain": header.config_object(DENSE),
    }
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_scaled_rotation_is_where_both_versions_of_transformers_look(tmp_path):
    exported(tmp_path / "out", MODELS["dense-llama3"])
    found = settings(tmp_path / "out")
    numbers = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    assert found["rope_scaling"] == numbers
    assert found["rope_parameters"] == numbers | {"rope_theta": 10000.0}


def test_rows_of_queries_and_keys_are_interleaved_head_by_head():
    matrix = torch.arange(8.0)[:, None].expand(8, 3)
    found = hf_layout.interleaved(matrix, head_dim=4)
    assert found[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(hf_layout.half_split(found, head_dim=4), matrix)


def test_a_qwen2_moe_has_a_shared_expert_twice_as_strong_behind_a_gate_of_a_half(tmp_path):
    made = exported(tmp_path / "out", MOE, arch="qwen2_moe")
    found = load_file(tmp_path / "out" / "model.safetensors")
    ours = dict(made.weights())
    mlp = "model.layers.1.mlp"
    assert not [name for name in found if ".shared_experts." in name]
    assert torch.equal(found[f"{mlp}.shared_expert_gate.weight"], torch.zeros(1, 24))
    down = found[f"{mlp}.shared_expert.down_proj.weight"]
    assert torch.equal(down, 2 * ours[f"{mlp}.shared_experts.down_proj.weight"])
    up = found[f"{mlp}.shared_expert.up_proj.weight"]
    assert torch.equal(up, ours[f"{mlp}.shared_experts.up_proj.weight"])


def test_a_qwen2_moe_without_a_shared_expert_has_one_of_zeros(tmp_path):
    exported(tmp_path / "out", MODELS["moe-alone"], arch="qwen2_moe")
    found = load_file(tmp_path / "out" / "model.safetensors")
    shared = {name: t for name, t in found.items() if ".shared_expert" in name}
    assert len(shared) == 4
    assert not any(t.any() for t in shared.values())


def test_an_ernie_has_a_correction_of_zero_in_every_moe_layer(tmp_path):
    exported(tmp_path / "out", MOE)
    found = load_file(tmp_path / "out" / "model.safetensors")
    corrections = {name: t for name, t in found.items() if "e_score_correction_bias" in name}
    assert list(corrections) == ["model.layers.1.mlp.moe_statics.e_score_correction_bias"]
    assert torch.equal(*corrections.values(), torch.zeros(1, 4))


def test_the_file_says_that_it_is_for_pytorch(tmp_path):
    exported(tmp_path / "out", DENSE)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("arch", ["ernie4_5_moe", "qwen2_moe", "own"])
def test_bf16_holds_the_nearest_values(tmp_path, arch):
    made = exported(tmp_path / "out", MOE, arch=arch, dtype="bfloat16")
    assert settings(tmp_path / "out")["dtype"] == "bfloat16"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    for (_, back), (name, ours) in zip(
        imported(tmp_path / "out").weights(), made.weights(), strict=True
    ):
        assert torch.equal(back, ours.bfloat16().float()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_are_no_larger_than_asked_and_an_index_says_where_what_is(tmp_path, dtype):
    made = exported(tmp_path / "out", MOE, max_shard_bytes=6_000, dtype=dtype)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    held = {shard.name: load_file(shard) for shard in shards}
    assert index["weight_map"] == {name: shard for shard in held for name in held[shard]}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in held.values()]
    assert len(sizes) > 2
    assert max(sizes) <= 6_000
    assert index["metadata"]["total_size"] == sum(sizes)
    kept = torch.float32 if dtype == "float32" else torch.bfloat16
    for (_, a), (_, b) in zip(made.weights(), imported(tmp_path / "out").weights(), strict=True):
        assert torch.equal(a.to(kept), b.to(kept))


def test_a_tensor_is_made_when_it_is_written_and_then_given_up(tmp_path, monkeypatch):
    alive = weakref.WeakSet()
    most = 0

    def counted(form, matrix, head_dim):
        nonlocal most
        alive.add(made := matrix.clone())
        most = max(most, len(alive))
        return made

    monkeypatch.setattr(hf_export, "to_stored", counted)
    exported(tmp_path / "out", MOE)
    assert 1 <= most <= 2  # the next one may be made while the last is still named


def test_the_tokenizer_its_tokens_and_its_template_are_beside_the_weights(tmp_path):
    config = dataclasses.replace(DENSE, vocab_size=600)
    words = files(bos="<|im_start|>", ends=(3,), chat_template="{{ messages }}")
    exported(tmp_path / "out", config, files=words)
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "bos_token": "<|im_start|>",
        "model_max_length": 32,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ messages }}",
    }
    ids = {"eos_token_id": [0, 3], "pad_token_id": 1, "bos_token_id": 2}
    assert settings(tmp_path / "out").items() >= ids.items()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == ids
    back = TokenizerFiles.read(tmp_path / "out")
    assert back.tokenizer.to_str() == words.tokenizer.to_str()
    assert (back.eos, back.pad, back.bos, back.ends) == (words.eos, words.pad, words.bos, (0, 3))
    assert back.chat_template == words.chat_template


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (MODELS["moe-scattered"], {}, r"moe_layers is \[0, 2\].*arch qwen2_moe"),
        (MODELS["moe-scattered"], {"arch": "ernie4_5_moe"}, "without gaps"),
        (MOE, {"arch": "llama"}, "has experts; export it as ernie4_5_moe or qwen2_moe"),
        (DENSE, {"arch": "qwen2_moe"}, "has no experts; export it as llama"),
        (DENSE, {"arch": "ernie4_5_moe"}, "has no experts; export it as llama"),
        (DENSE, {"arch": "mixtral"}, "arch is 'mixtral'; known are auto, llama"),
        (DENSE, {"dtype": "float16"}, "dtype is 'float16'; it must be float32 or bfloat16"),
        (DENSE, {"max_shard_bytes": 0}, "max_shard_bytes must be at least 1, got 0"),
        (DENSE, {"files": ...}, "the tokenizer has 600 tokens, but the model's vocab_size is 37"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_cannot_be_exported_is_refused_with_a_way_out(tmp_path, config, options, message):
    made = model(config)
    options = {key: files() if value is ... else value for key, value in options.items()}
    with pytest.raises(InvalidConfig, match=message):
        write_directory(tmp_path / "out", config, made.weights(), **options)
    assert not list(tmp_path.iterdir())


def test_adapters_are_not_left_out_without_a_word(tmp_path):
    config = dataclasses.replace(DENSE, lora=LoraConfig(rank=2))
    with pytest.raises(InvalidConfig, match="merge them into the weights first"):
        write_directory(tmp_path / "out", config, [])


def test_a_width_of_heads_that_a_class_does_not_declare_is_warned_of(tmp_path):
    config = dataclasses.replace(MOE, head_dim=10)
    with pytest.warns(UserWarning, match="head_dim is 10, and not d_model / n_heads"):
        exported(tmp_path / "out", config)


def test_the_layout_of_training_checkpoints_holds_any_model(tmp_path):
    config = MODELS["moe-scattered"]
    made = exported(tmp_path / "out", config, arch="own")
    assert settings(tmp_path / "out")["model_type"] == "fastbrain_moe"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in found.items() if t.dim() == 2} == {
        name: tuple(t.shape) for name, t in made.weights() if not name.endswith("norm.weight")
    }
    assert imported(tmp_path / "out").config == config


def test_a_model_of_another_shape_is_a_mistake_of_the_caller(tmp_path):
    made = TransformerLm(TransformerConfig(**vars(DENSE) | {"n_layers": 1}), seed=0)
    with pytest.raises(KeyError):
        write_directory(tmp_path / "out", DENSE, made.weights())
    assert not list(tmp_path.iterdir())


def test_shards_smaller_than_any_tensor_hold_one_each(tmp_path):
    made = exported(tmp_path / "out", DENSE, max_shard_bytes=1)
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) == len(made.weights())
    assert all(len(load_file(shard)) == 1 for shard in shards)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_exported(tmp_path, value):
    lm = model(DENSE)
    with torch.no_grad():
        lm.module.norm.weight[5] = value
    with pytest.raises(InvalidConfig, match=r"norm\.weight holds values that are not finite"):
        lm.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())
