"""Everything that a Hugging Face directory may say that we cannot compute is refused by name."""

import dataclasses
import json

import pytest
import torch
from hf_directories import exported, settings, with_settings, with_tensors
from hostile_readers import measured
from models import DENSE, MOE
from safetensors.torch import save_file

from fastbrain import TransformerLm
from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot, Io, Serde
from fastbrain.formats.hf_import import Directory

LLAMA, ERNIE, QWEN2 = (DENSE, "llama"), (MOE, "ernie4_5_moe"), (MOE, "qwen2_moe")
EMBEDDING = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj"

# (model, changed keys, kind of error, what it says)
SETTINGS = {
    "type": (LLAMA, {"model_type": "mixtral"}, InvalidConfig, "model_type is 'mixtral'"),
    "no-type": (LLAMA, {"model_type": ...}, InvalidConfig, "model_type is None"),
    "act": (LLAMA, {"hidden_act": "gelu"}, InvalidConfig, "hidden_act is 'gelu'"),
    "bias": (LLAMA, {"attention_bias": True}, InvalidConfig, "attention_bias is True"),
    "mlp-bias": (LLAMA, {"mlp_bias": True}, InvalidConfig, "mlp_bias is True"),
    "ernie-bias": (ERNIE, {"use_bias": True}, InvalidConfig, "use_bias is True"),
    "qwen-bias": (QWEN2, {"qkv_bias": True}, InvalidConfig, "qkv_bias is True"),
    "qwen-bias-unsaid": (QWEN2, {"qkv_bias": ...}, InvalidConfig, "qkv_bias is True"),
    "window": (LLAMA, {"sliding_window": 64}, InvalidConfig, "sliding_window is 64"),
    "uses-window": (QWEN2, {"use_sliding_window": True}, InvalidConfig, "use_sliding_window"),
    "layers": (
        LLAMA,
        {"layer_types": ["full_attention", "sliding_attention"]},
        InvalidConfig,
        "layer_types names 'sliding_attention'",
    ),
    "quantized": (
        LLAMA,
        {"quantization_config": {"quant_method": "gptq"}},
        InvalidConfig,
        "quantization_config is {'quant_method': 'gptq'}",
    ),
    "qk-norm": (LLAMA, {"use_qk_norm": True}, InvalidConfig, "use_qk_norm is True"),
    "bidirectional": (LLAMA, {"is_causal": False}, InvalidConfig, "is_causal is False"),
    "partial": (LLAMA, {"partial_rotary_factor": 0.5}, InvalidConfig, "partial_rotary_factor"),
    "yarn": (
        LLAMA,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        InvalidConfig,
        "rope_type in rope_parameters is 'yarn'; fastbrain knows default, linear and llama3",
    ),
    "dynamic": (
        LLAMA,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...},
        InvalidConfig,
        "rope_type in rope_scaling is 'dynamic'",
    ),
    "rope-of-layers": (
        LLAMA,
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        InvalidConfig,
        "all layers turn by the same frequencies",
    ),
    "rope-part": (
        LLAMA,
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        InvalidConfig,
        r"rope_parameters.partial_rotary_factor is 0.25",
    ),
    "two-thetas": (
        LLAMA,
        {"rope_theta": 5e5},
        InvalidConfig,
        "rope_theta is 500000.0 in config.json and 10000.0 in rope_parameters",
    ),
    "two-scalings": (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        InvalidConfig,
        "make them agree",
    ),
    "two-types": (
        LLAMA,
        {"rope_scaling": {"type": "linear", "rope_type": "llama3"}, "rope_parameters": ...},
        InvalidConfig,
        "rope_type 'llama3' and type 'linear'",
    ),
    "no-factor": (
        LLAMA,
        {"rope_parameters": {"rope_type": "linear"}},
        Serde,
        "rope_parameters lacks the key factor",
    ),
    "gates": (QWEN2, {"norm_topk_prob": False}, InvalidConfig, "norm_topk_prob is False"),
    "gates-unsaid": (QWEN2, {"norm_topk_prob": ...}, InvalidConfig, "norm_topk_prob is False"),
    "step": (QWEN2, {"decoder_sparse_step": 2}, InvalidConfig, "decoder_sparse_step is 2"),
    "interval": (ERNIE, {"moe_layer_interval": 2}, InvalidConfig, "moe_layer_interval is 2"),
    "two-shared": (
        ERNIE,
        {"moe_num_shared_experts": 2},
        InvalidConfig,
        "moe_num_shared_experts is 2; fastbrain has one shared expert or none",
    ),
    "two-shared-unsaid": (
        ERNIE,
        {"moe_num_shared_experts": ...},
        InvalidConfig,
        "moe_num_shared_experts is 2",
    ),
    "least": (ERNIE, {"moe_norm_min": 0.5}, InvalidConfig, "moe_norm_min is 0.5"),
    "wide-shared": (
        QWEN2,
        {"shared_expert_intermediate_size": 48},
        InvalidConfig,
        "shared_expert_intermediate_size is 48 and moe_intermediate_size 12",
    ),
    "heads": (LLAMA, {"head_dim": ..., "num_attention_heads": 5}, InvalidConfig, "no multiple"),
    "odd": (LLAMA, {"num_key_value_heads": 3}, InvalidConfig, "n_heads must be a multiple"),
    "no-width": (LLAMA, {"hidden_size": ...}, Serde, "the key hidden_size is missing"),
    "text": (LLAMA, {"vocab_size": "37"}, Serde, "vocab_size must be a whole number"),
    "eps": (LLAMA, {"rms_norm_eps": "small"}, Serde, "rms_norm_eps must be a finite number"),
    "tied": (LLAMA, {"tie_word_embeddings": 1}, Serde, "tie_word_embeddings must be true or false"),
    "dense": (QWEN2, {"mlp_only_layers": 3}, Serde, "mlp_only_layers must be a list"),
    "many": (LLAMA, {"num_hidden_layers": 10**9}, InvalidConfig, "num_hidden_layers is 1000000000"),
    "experts": (ERNIE, {"moe_num_experts": 10**9}, InvalidConfig, "more than the 50000 allowed"),
    "huge": (LLAMA, {"vocab_size": 2**40}, InvalidSnapshot, r"is \[37, 24\] and not \[1099511627"),
    "big-number": (LLAMA, {"rope_theta": 10**400}, Serde, "must be a finite number"),
    "own-moe": (ERNIE, {"model_type": "fastbrain_moe"}, Serde, "the key fastbrain is missing"),
}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize(("made", "changes", "kind", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_we_lack_is_refused_by_name_and_value(out, made, changes, kind, message):
    config, arch = made
    exported(out, config, arch=arch)
    Directory.open(out)
    with_settings(out, changes)
    with pytest.raises(kind, match=message) as caught:
        Directory.open(out)
    assert str(out) in str(caught.value)


@pytest.mark.parametrize(
    ("made", "changes", "message"),
    [
        (
            LLAMA,
            {"hidden_size": 48},
            "hidden_size gives 48, but d_model in the fastbrain key is 24",
        ),
        (LLAMA, {"rms_norm_eps": 1e-5}, "rms_norm_eps gives 1e-05, but rmsnorm_eps"),
        (LLAMA, {"rope_theta": 2e4, "rope_parameters": ...}, "rope_theta gives 20000.0"),
        (LLAMA, {"tie_word_embeddings": False}, "tie_word_embeddings gives False"),
        (ERNIE, {"moe_k": 1}, "moe_k gives 1, but experts_per_token in the fastbrain key is 2"),
        (ERNIE, {"moe_num_shared_experts": 0}, "moe_num_shared_experts gives False"),
        (ERNIE, {"moe_layer_start_index": 0}, r"gives \(0, 1\), but moe_layers"),
        (QWEN2, {"mlp_only_layers": []}, r"mlp_only_layers gives \(0, 1\)"),
        (ERNIE, {"model_type": "llama"}, r"model_type gives \(\), but moe_layers"),
    ],
)
def test_what_contradicts_our_own_key_is_refused_by_both_names(out, made, changes, message):
    config, arch = made
    exported(out, config, arch=arch)
    with_settings(out, changes, keep_own=True)
    with pytest.raises(InvalidConfig, match=message):
        Directory.open(out)


@pytest.mark.parametrize("count", [2**31, 10**10])
@pytest.mark.parametrize("keep_own", [False, True])
def test_positions_whose_rotations_would_fill_the_memory_are_refused(out, count, keep_own):
    exported(out, DENSE)
    changes = {"max_position_embeddings": count}
    if keep_own:
        changes["fastbrain"] = settings(out)["fastbrain"] | {"max_seq_len": count}
    with_settings(out, changes, keep_own=keep_own)

    def read():
        with pytest.raises(InvalidConfig, match=rf"max_seq_len must be at most .* {count:,}"):
            TransformerLm.from_pretrained(out)

    measured(read)


def removed(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def a_head_with_one_other_value(tensors):
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    tensors["lm_head.weight"][-1, -1] += 1


def added(name, *shape):
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def replaced(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


SHARED_GATE = "model.layers.1.mlp.shared_expert_gate.weight"
CORRECTION = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
TENSORS = {
    "missing": (LLAMA, removed(f"{Q}.weight"), f"it lacks 1 tensors: {Q}.weight"),
    "extra": (LLAMA, added("model.extra.weight", 2), "1 tensors that such a model lacks: model.ex"),
    "bias": (LLAMA, added(f"{Q}.bias", 24), f"{Q}.bias; fastbrain has no biases"),
    "qk-norm": (
        LLAMA,
        added("model.layers.0.self_attn.q_norm.weight", 6),
        "fastbrain does not normalize queries and keys",
    ),
    "shape": (LLAMA, replaced(f"{Q}.weight", lambda t: t[:, :12]), r"is \[24, 12\] and not \[24, "),
    "rank": (LLAMA, replaced("model.norm.weight", lambda t: t[None]), r"\[1, 24\] and not \[24\]"),
    "dtype": (LLAMA, replaced(EMBEDDING, lambda t: t.double()), "dtype F64; fastbrain reads F32"),
    "head": (LLAMA, added("lm_head.weight", 37, 24), "lm_head.weight, which differs from model.em"),
    "near-head": (LLAMA, a_head_with_one_other_value, "lm_head.weight, which differs from model"),
    "small-head": (LLAMA, added("lm_head.weight", 3, 24), "lm_head.weight, which differs"),
    "gate": (QWEN2, replaced(SHARED_GATE, torch.ones_like), f"{SHARED_GATE} must be all zeros"),
    "correction": (ERNIE, replaced(CORRECTION, torch.ones_like), "must be all zeros.* but 1.0 is"),
    "nan": (ERNIE, replaced(CORRECTION, lambda t: t * torch.nan), "must be all zeros.* but nan is"),
}


@pytest.mark.parametrize(("made", "change", "message"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_that_does_not_belong_is_refused_by_name(out, made, change, message):
    config, arch = made
    exported(out, config, arch=arch)
    with_tensors(out, change)
    with pytest.raises(InvalidSnapshot, match=message):
        Directory.open(out)


def test_five_of_many_names_are_shown(out):
    exported(out, DENSE)

    def change(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            tensors[name.replace("model.", "transformer.")] = tensors.pop(name)

    with_tensors(out, change)
    with pytest.raises(InvalidSnapshot, match=r"lacks 6 tensors: .*down_proj.*, and 1 more") as e:
        Directory.open(out)
    assert "it has 6 tensors that such a model lacks: transformer.layers.0" in str(e.value)


def test_a_shared_expert_that_our_key_denies_must_be_zero(out):
    exported(out, dataclasses.replace(MOE, shared_expert=False), arch="qwen2_moe")
    with_tensors(out, replaced("model.layers.1.mlp.shared_expert.up_proj.weight", torch.ones_like))
    with pytest.raises(InvalidSnapshot, match=r"shared_expert\.up_proj\.weight must be all zeros"):
        Directory.open(out)


def index_of(out):
    return json.loads((out / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("../model-00001-of-00002.safetensors", "without a path"),
        ("/etc/passwd", "without a path"),
        ("sub\\model.safetensors", "without a path"),
        ("pytorch_model.bin", "must name a .safetensors file beside it"),
        (7, "is in 7; it must name"),
        ("gone.safetensors", "cannot read .*gone.safetensors: No such file"),
        ("model-00002-of-{}.safetensors", "which model.safetensors.index.json says is in it|of wh"),
    ],
)
def test_an_index_names_files_beside_it_that_hold_what_it_says(out, shard, message):
    exported(out, DENSE, max_shard_bytes=6_000)
    index = index_of(out)
    count = len(list(out.glob("model-*")))
    shard = shard.format(f"{count:05}") if isinstance(shard, str) else shard
    index["weight_map"][EMBEDDING] = shard
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((InvalidSnapshot, Io), match=message):
        Directory.open(out)


def test_a_tensor_in_two_shards_or_in_none_is_refused(out):
    exported(out, DENSE, max_shard_bytes=6_000)
    shards = sorted(out.glob("model-*"))
    index = index_of(out)
    index["weight_map"]["model.more.weight"] = shards[0].name
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidSnapshot, match=r"lacks tensor 'model\.more\.weight'"):
        Directory.open(out)
    del index["weight_map"]["model.more.weight"]
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    Directory.open(out)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(InvalidSnapshot, match=r"is in .*00001.* and in .*00002"):
        Directory.open(out)


def test_weights_that_would_have_to_be_unpickled_are_refused_with_advice(out):
    exported(out, DENSE)
    (out / "model.safetensors").rename(out / "pytorch_model.bin")
    with pytest.raises(InvalidConfig, match=r"convert it with transformers: AutoModel.*save_pretr"):
        Directory.open(out)


def test_a_directory_without_weights_or_settings_says_so(out):
    exported(out, DENSE)
    (out / "model.safetensors").unlink()
    with pytest.raises(Io, match=r"neither model\.safetensors nor model\.safetensors\.index"):
        Directory.open(out)
    (out / "config.json").unlink()
    with pytest.raises(Io, match=r"cannot read .*config\.json: No such file"):
        Directory.open(out)
    (out / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="holds an adapter without its model"):
        Directory.open(out)


def test_weights_cut_short_are_refused_before_a_model_is_made(out):
    exported(out, DENSE)
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Io, match="is cut short"):
        Directory.open(out)


HOSTILE = {
    "deep": b"[" * 50_000,
    "wide": b"[" + b"{}," * 20_000 + b"{}]",
    "list": b"[1, 2]",
    "no-json": b"\x00" * 1000,
    "large": b" " * (1 << 21),
    "twice": b'{"model_type": "llama", "model_type": "llama"}',
    "number": b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
    "infinite": b'{"model_type": "llama", "vocab_size": 1e999}',
    "nothing": b"",
}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused_soon_and_in_our_words(out, file, content):
    exported(out, DENSE, max_shard_bytes=6_000)
    (out / file).write_bytes(content)

    def read():
        with pytest.raises(FastBrainError) as caught:
            Directory.open(out)
        assert len(str(caught.value)) < 1_000

    measured(read)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_text_larger_than_any_model_has_is_not_parsed(out, file):
    exported(out, DENSE, max_shard_bytes=6_000)
    content = (out / file).read_bytes()
    (out / file).write_bytes(content + b" " * (1 << 20))
    with pytest.raises(Serde, match=rf"{file} has 10\d{{5}} bytes, more than the \d+ allowed"):
        Directory.open(out)


def test_layers_without_number_are_not_listed(out):
    exported(out, MOE)
    with_settings(out, {"num_hidden_layers": 5_000, "moe_num_experts": 1}, keep_own=False)

    def read():
        with pytest.raises(FastBrainError):
            Directory.open(out)

    measured(read)


def test_names_that_a_terminal_would_obey_are_escaped(out):
    exported(out, DENSE)
    with_tensors(out, added("evil\x1b[2J.weight", 2))
    with pytest.raises(InvalidSnapshot) as caught:
        Directory.open(out)
    assert str(caught.value).isprintable()


def test_other_files_of_the_package_are_left_alone(out):
    exported(out, DENSE)
    save_file({"x": torch.ones(1)}, out / "other.safetensors")
    (out / "training_args.bin").write_bytes(b"\x80")
    Directory.open(out)
