"""Models in Hugging Face directories, of other programs and our own, read value for value."""

import dataclasses
import json

import pytest
import torch
from fixture_models import FIXTURES, assert_same_bits
from hf_directories import EXPORTS, MODELS, exported, imported, with_settings, with_tensors
from models import DENSE, MOE, model, random_ids

from fastbrain import TransformerLm
from fastbrain.config import LinearScaling, Llama3Scaling, LoraConfig
from fastbrain.errors import InvalidSnapshot
from fastbrain.formats import binary, huggingface
from fastbrain.formats.hf_export import write_directory
from fastbrain.formats.hf_import import Directory
from fastbrain.formats.safetensors_file import write_tensors

Q = "model.layers.0.self_attn.q_proj.weight"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_a_directory_of_the_reference_system_has_the_values_of_its_weights_file():
    found = imported(FIXTURES / "dense" / "hf")
    expected = TransformerLm.load_bin(FIXTURES / "dense" / "trained.rbw")
    assert_same_bits(found.weights(), expected.weights())
    ours, theirs = vars(expected.config), vars(found.config)
    # of a dense model, those of experts say nothing
    about = {name for name in ours if "moe" not in name and "expert" not in name}
    assert {name: theirs[name] for name in about} == {name: ours[name] for name in about}
    assert found.config.moe_layers == ()


@pytest.mark.parametrize(("name", "arch"), [*EXPORTS, ("moe-scattered", "own")])
def test_what_was_exported_comes_back_bit_for_bit(tmp_path, name, arch):
    shard = 5_000 if name.startswith("moe") else 10**9
    made = exported(tmp_path / "out", MODELS[name], arch=arch, max_shard_bytes=shard)
    back = imported(tmp_path / "out")
    assert back.config == made.config
    assert_same_bits(back.weights(), made.weights())


@pytest.mark.parametrize(("name", "arch"), EXPORTS)
def test_without_our_own_key_the_model_computes_the_same(tmp_path, name, arch):
    made = exported(tmp_path / "out", MODELS[name], arch=arch)
    with_settings(tmp_path / "out", {})
    back = imported(tmp_path / "out")
    ids = random_ids(2, 20)
    with torch.no_grad():
        assert torch.equal(back.module(ids), made.module(ids))
    assert back.config.moe_layers == made.config.moe_layers
    assert back.config.rope_scaling == made.config.rope_scaling
    # it does not say whether a shared expert of zeros is one
    if (name, arch) != ("moe-alone", "qwen2_moe"):
        assert_same_bits(back.weights(), made.weights())


@pytest.mark.parametrize("arch", ["ernie4_5_moe", "qwen2_moe"])
def test_bf16_and_f16_become_fp32(tmp_path, arch):
    made = exported(tmp_path / "out", MOE, arch=arch)
    expected = dict(made.weights())

    def narrow(tensors):
        for i, (name, tensor) in enumerate(tensors.items()):
            tensors[name] = tensor.to([torch.bfloat16, torch.float16, torch.float32][i % 3])

    with_tensors(tmp_path / "out", narrow)
    back = dict(imported(tmp_path / "out").weights())
    assert back.keys() == expected.keys()
    for name, tensor in back.items():
        error = (tensor - expected[name]).abs().max()
        assert 0 <= error <= 2**-8 * expected[name].abs().max(), name


@pytest.mark.parametrize("arch", ["ernie4_5_moe", "qwen2_moe", "own"])
def test_values_that_bf16_holds_are_kept_through_every_layout(tmp_path, arch):
    made = model(MOE)
    for _, view in made.weights():
        view.copy_(view.bfloat16())
    write_directory(tmp_path / "out", MOE, made.weights(), arch=arch, dtype="bfloat16")
    assert_same_bits(imported(tmp_path / "out").weights(), made.weights())


def test_training_checkpoints_are_read_as_they_are(tmp_path):
    for name in ("dense", "moe-scattered"):
        made = model(MODELS[name])
        folder = tmp_path / name
        folder.mkdir()
        config = huggingface.config_json(made.config)
        (folder / "config.json").write_text(json.dumps(config))
        write_tensors(folder / "model.safetensors", huggingface.stored(made.weights()))
        back = imported(folder)
        assert back.config == made.config
        assert_same_bits(back.weights(), made.weights())


@pytest.mark.parametrize("name", ["dense", "moe-scattered"])
def test_adapters_of_a_training_checkpoint_are_read_beside_the_weights(tmp_path, name):
    made = model(MODELS[name])
    made.add_lora(LoraConfig(rank=2, alpha=3.0, seed=5))
    for tensor_name, view in made.weights():
        if tensor_name.endswith("lora_B.weight"):
            view.normal_()
    config = huggingface.config_json(made.config)
    assert config["model_type"] == "fastbrain_lora"
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", huggingface.stored(made.weights()))
    back = TransformerLm.from_pretrained(tmp_path)
    assert back.config == made.config
    assert_same_bits(back.weights(), made.weights())


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_parameters": ...}, None),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}}, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, LinearScaling(4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3"} | LLAMA3},
            Llama3Scaling(8.0, 1.0, 4.0, 16),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3},
            Llama3Scaling(8.0, 1.0, 4.0, 16),
        ),
        ({"rope_theta": 500000, "rope_scaling": None, "torch_dtype": "bfloat16"}, None),
    ],
    ids=["v4", "v5", "v4-linear", "v4-llama3", "v5-llama3", "v4-integer"],
)
def test_rotary_settings_are_read_where_either_version_puts_them(tmp_path, changes, scaling):
    exported(tmp_path / "out", DENSE)
    absent = {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...}
    with_settings(tmp_path / "out", absent | changes)
    found = Directory.open(tmp_path / "out").config
    assert (found.rope_base, found.rope_scaling) == (5e5, scaling)


@pytest.mark.parametrize(
    ("arch", "theta", "eps", "tied"),
    [
        ("llama", 1e4, 1e-6, False),
        ("ernie4_5_moe", 5e5, 1e-5, True),
        ("qwen2_moe", 1e4, 1e-6, False),
    ],
)
def test_what_is_absent_means_what_transformers_takes_it_to_mean(tmp_path, arch, theta, eps, tied):
    config = dataclasses.replace(DENSE if arch == "llama" else MOE, tie_embeddings=tied)
    exported(tmp_path / "out", config, arch=arch)
    names = ("rope_theta", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "hidden_act")
    with_settings(tmp_path / "out", dict.fromkeys((*names, "head_dim", "moe_norm_min"), ...))
    found = Directory.open(tmp_path / "out").config
    assert found.rope_base == theta
    assert found.rmsnorm_eps == eps
    assert found.tie_embeddings is tied
    assert found.head_dim == 6


def test_heads_of_keys_are_as_many_as_heads_where_nothing_is_said(tmp_path):
    exported(tmp_path / "out", dataclasses.replace(DENSE, n_kv_heads=4))
    with_settings(tmp_path / "out", {"num_key_value_heads": ...})
    assert Directory.open(tmp_path / "out").config.n_kv_heads == 4


def test_the_last_moe_layer_may_be_called_minus_one(tmp_path):
    exported(tmp_path / "out", MOE)
    with_settings(tmp_path / "out", {"moe_layer_end_index": -1}, keep_own=True)
    assert Directory.open(tmp_path / "out").config.moe_layers == (1,)


def test_a_range_of_moe_layers_may_go_past_the_last_one(tmp_path):
    exported(tmp_path / "out", MOE)
    with_settings(tmp_path / "out", {"moe_layer_end_index": 9}, keep_own=True)
    assert Directory.open(tmp_path / "out").config.moe_layers == (1,)


def test_a_table_of_frequencies_and_a_second_copy_of_a_tied_head_are_passed_over(tmp_path):
    made = exported(tmp_path / "out", DENSE)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    with_tensors(tmp_path / "out", add)
    assert_same_bits(imported(tmp_path / "out").weights(), made.weights())


def test_other_digits_of_the_same_fp32_number_agree_with_our_own_key(tmp_path):
    exported(tmp_path / "out", DENSE)
    changes = {"rms_norm_eps": 9.999999974752427e-7, "rope_theta": 10000}
    with_settings(tmp_path / "out", changes, keep_own=True)
    assert Directory.open(tmp_path / "out").config == DENSE


@pytest.mark.parametrize(
    ("config", "arch", "changes"),
    [
        (DENSE, "llama", {"sliding_window": 64, "use_sliding_window": False}),
        (MOE, "qwen2_moe", {"sliding_window": 64, "use_sliding_window": ...}),
        (DENSE, "llama", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_window_that_is_not_used_is_passed_over(tmp_path, config, arch, changes):
    exported(tmp_path / "out", config, arch=arch)
    with_settings(tmp_path / "out", changes, keep_own=True)
    assert Directory.open(tmp_path / "out").config == config


def test_losses_of_routing_are_only_known_to_our_own_key(tmp_path):
    config = dataclasses.replace(MOE, aux_loss_weight=0.5, router_z_loss_weight=0.0)
    exported(tmp_path / "out", config)
    assert Directory.open(tmp_path / "out").config == config
    with_settings(tmp_path / "out", {})
    assert Directory.open(tmp_path / "out").config.aux_loss_weight == 0.01


def test_a_tensor_larger_than_a_block_is_read_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr(binary, "_BLOCK_BYTES", 1_000)
    made = exported(tmp_path / "out", MOE, arch="ernie4_5_moe")
    assert_same_bits(imported(tmp_path / "out").weights(), made.weights())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path, number, dtype):
    exported(tmp_path / "out", DENSE)

    def spoil(tensors):
        tensors[Q] = tensors[Q].to(dtype)
        tensors[Q][-1, -1] = number

    with_tensors(tmp_path / "out", spoil)
    with pytest.raises(InvalidSnapshot, match=f"{Q} has values that are not finite numb"):
        TransformerLm.from_pretrained(tmp_path / "out")
