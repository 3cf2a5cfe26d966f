"""GGUF files hold what llama.cpp wants, in its order, and give back the model to the bit."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from gguf_files import SMALL, read
from golden import golden_tensors

from fastbrain.config import LinearScaling, Llama3Scaling, LoraConfig, TransformerConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.formats import binary, gguf_write
from fastbrain.formats.gguf_config import OWN_KEY
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.formats.gguf_write import PRECISIONS, write_gguf
from fastbrain.layers import rotary_table
from fastbrain.transformer import pieces

gguf = pytest.importorskip("gguf")

DENSE = replace(SMALL, tie_embeddings=True, aux_loss_weight=0.03, num_experts=5)
MOE = TransformerConfig(
    vocab_size=40,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    d_ff=64,
    moe_d_ff=24,
    num_experts=3,
    experts_per_token=2,
    moe_layers=(1, 2),
    max_seq_len=128,
    router_z_loss_weight=0.002,
)
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 64)
MODELS = {
    "dense": DENSE,
    "untied": SMALL,
    "moe": MOE,
    "all layers moe": replace(MOE, moe_layers=(0, 1, 2), tie_embeddings=False),
    "linear": replace(DENSE, rope_scaling=LinearScaling(4.0)),
    "linear by one": replace(DENSE, rope_scaling=LinearScaling(1.0)),
    "linear moe": replace(MOE, rope_scaling=LinearScaling(4.0)),
    "llama 3": replace(DENSE, rope_scaling=LLAMA3),
}


def weights(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (piece.name, torch.randn(piece.rows, piece.cols, generator=generator))
        for piece in pieces(config)
    ]


def written(folder, config, made=None, **options):
    path = folder / "model.gguf"
    write_gguf(path, config, made or weights(config), **options)
    return path


def looked_into(path):
    """What the gguf package finds: values by key, and (type, shape, data) by tensor."""
    reader = gguf.GGUFReader(path)
    tensors = {
        each.name: (each.tensor_type.name, each.shape[::-1].tolist(), each.data)
        for each in reader.tensors
    }
    return {name: each.contents() for name, each in reader.fields.items()}, tensors


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_to_the_bit(tmp_path, name):
    config = MODELS[name]
    path = written(tmp_path, config)
    assert GgufModel.open(path).config == config
    found = read(path)
    for name, truth in weights(config):
        assert torch.equal(found[name], truth), name


def test_blocks_of_rows_change_nothing(tmp_path, monkeypatch):
    whole = {
        each: written(tmp_path, MOE, precision=each, force=True).read_bytes() for each in PRECISIONS
    }
    monkeypatch.setattr(binary, "_BLOCK_BYTES", 300)
    for each in PRECISIONS:
        path = written(tmp_path, MOE, precision=each, force=True)
        assert path.read_bytes() == whole[each]
    assert all(torch.isfinite(each).all() for each in read(path).values())


def test_other_precisions_are_as_near_as_they_can_be(tmp_path):
    for precision in ("bf16", "q8_0"):
        found = read(written(tmp_path, MOE, precision=precision, force=True))
        for name, truth in weights(MOE):
            error = (found[name] - truth).abs()
            if name.endswith(("norm.weight", "mlp.gate.weight")):
                assert not error.any(), name
            elif precision == "bf16" or truth.shape[1] % 32:
                assert (error <= truth.abs() / 256).all(), name
            else:
                # half a step, and what the scale of 11 bits takes from 127 of them
                block = truth.view(truth.shape[0], -1, 32).abs().amax(dim=2, keepdim=True)
                most = block / 127 * (0.5 + 127 / 2048) + 1e-7
                assert (error.view_as(truth.view(truth.shape[0], -1, 32)) <= most).all(), name


COMMON = {
    "block_count": 3, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 6,
    "attention.value_length": 6, "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    "rope.freq_base": 10_000.0, "rope.dimension_count": 6, "vocab_size": 40,
}  # fmt: skip
MIXTURE = {
    "expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 24,
    "expert_shared_count": 1, "expert_shared_feed_forward_length": 24,
    "leading_dense_block_count": 1, "interleave_moe_layer_step": 1,
}  # fmt: skip


def test_the_keys_of_a_mixture_are_those_that_llama_cpp_wants(tmp_path):
    keys, _ = looked_into(written(tmp_path, MOE, name="My model"))
    own = {key: value for key, value in keys.items() if not key.startswith("GGUF.")}
    assert own.pop(OWN_KEY).startswith('{"vocab_size":40,')
    assert own == {
        "general.architecture": "ernie4_5-moe",
        "general.type": "model",
        "general.name": "My model",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "none",
        **{f"ernie4_5-moe.{key}": value for key, value in {**COMMON, **MIXTURE}.items()},
    }


def test_the_keys_of_a_dense_model_are_those_that_llama_cpp_wants(tmp_path):
    config = replace(MOE, moe_layers=(), rope_scaling=LinearScaling(4.0))
    keys, _ = looked_into(written(tmp_path, config, precision="q8_0"))
    own = {key for key in keys if key.startswith("llama.")}
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert {key: keys[key] for key in own} == {
        f"llama.{key}": value for key, value in {**COMMON, **scaling}.items()
    }
    assert (keys["general.architecture"], keys["general.file_type"]) == ("llama", 7)
    assert keys["general.name"] == "model"


def test_tensors_have_the_shapes_and_types_that_llama_cpp_wants(tmp_path):
    config = replace(MOE, tie_embeddings=False)
    _, found = looked_into(written(tmp_path, config, precision="q8_0"))
    attention = {
        "attn_norm": ("F32", [32]),
        "attn_q": ("Q8_0", [24, 32]),
        "attn_k": ("Q8_0", [12, 32]),
        "attn_v": ("Q8_0", [12, 32]),
        # rows of 24 are no whole blocks
        "attn_output": ("BF16", [32, 24]),
        "ffn_norm": ("F32", [32]),
    }
    dense = {
        "ffn_gate": ("Q8_0", [64, 32]),
        "ffn_up": ("Q8_0", [64, 32]),
        "ffn_down": ("Q8_0", [32, 64]),
    }
    mixture = {
        "ffn_gate_inp": ("F32", [3, 32]),
        "ffn_gate_exps": ("Q8_0", [3, 24, 32]),
        "ffn_up_exps": ("Q8_0", [3, 24, 32]),
        "ffn_down_exps": ("BF16", [3, 32, 24]),
        "ffn_gate_shexp": ("Q8_0", [24, 32]),
        "ffn_up_shexp": ("Q8_0", [24, 32]),
        "ffn_down_shexp": ("BF16", [32, 24]),
    }
    expected = {
        "token_embd.weight": ("Q8_0", [40, 32]),
        "output_norm.weight": ("F32", [32]),
        "output.weight": ("Q8_0", [40, 32]),
    }
    for i, own in enumerate([dense, mixture, mixture]):
        expected |= {f"blk.{i}.{name}.weight": each for name, each in {**attention, **own}.items()}
    assert {name: each[:2] for name, each in found.items()} == expected


def test_rows_of_queries_and_keys_are_paired(tmp_path):
    _, found = looked_into(written(tmp_path, DENSE, golden_list(DENSE)))
    views = dict(golden_tensors(DENSE))
    for part, heads in (("q", 4), ("k", 2)):
        theirs = torch.from_numpy(found[f"blk.1.attn_{part}.weight"][2].copy())
        ours = views[f"model.layers.1.self_attn.{part}_proj.weight"]
        rows = [6 * head + row for head in range(heads) for row in (0, 3, 1, 4, 2, 5)]
        assert torch.equal(theirs, ours[rows])
    theirs = torch.from_numpy(found["blk.1.attn_v.weight"][2].copy())
    assert torch.equal(theirs, views["model.layers.1.self_attn.v_proj.weight"])


def golden_list(config):
    return list(golden_tensors(config))


def test_experts_are_stacked_in_order(tmp_path):
    _, found = looked_into(written(tmp_path, MOE, golden_list(MOE)))
    views = dict(golden_tensors(MOE))
    for part in ("gate", "up", "down"):
        stacked = torch.from_numpy(found[f"blk.2.ffn_{part}_exps.weight"][2].copy())
        for expert in range(3):
            name = f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"
            assert torch.equal(stacked[expert], views[name])


def test_factors_divide_the_frequencies_into_those_of_the_model(tmp_path):
    config = replace(DENSE, head_dim=16, rope_scaling=LLAMA3, rope_base=1_000.0)
    _, found = looked_into(written(tmp_path, config))
    kind, shape, factors = found["rope_freqs.weight"]
    assert (kind, shape) == ("F32", [8])
    # some are kept, some divided in full, and some between
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)
    assert any(1.1 < each < 7.9 for each in factors)
    cos, sin = rotary_table(config)
    for position in (1, 2, 77, 127):
        for j, factor in enumerate(factors.tolist()):
            angle = position * 1_000.0 ** (-2 * j / 16) / factor
            assert cos[position, j] == pytest.approx(math.cos(angle), abs=2e-5)
            assert sin[position, j] == pytest.approx(math.sin(angle), abs=2e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe_layers": (0, 2)}, r"moe_layers is \[0, 2\]"),
        ({"moe_layers": (1,)}, r"moe_layers is \[1\]"),
        ({"shared_expert": False}, "shared_expert is false"),
        ({"num_experts": 513}, "num_experts is 513"),
        ({"rope_scaling": LLAMA3}, "rope_scaling is Llama 3's"),
    ],
)
def test_a_mixture_that_llama_cpp_cannot_run_is_refused_with_a_way_out(tmp_path, change, words):
    with pytest.raises(InvalidConfig, match=words + ".*--arch qwen2_moe"):
        written(tmp_path, replace(MOE, **change))
    assert not list(tmp_path.iterdir())


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="precision must be one of f32, bf16, q8_0, got 'q4'"):
        written(tmp_path, DENSE, precision="q4")
    with pytest.raises(InvalidConfig, match="not those of a model with this configuration"):
        written(tmp_path, DENSE, weights(MOE))
    wide = replace(DENSE, d_ff=1 << 32)
    expanded = [
        (each.name, torch.zeros(1, 1).expand(each.rows, each.cols)) for each in pieces(wide)
    ]
    with pytest.raises(InvalidConfig, match=r"feed_forward_length would be 4294967296"):
        written(tmp_path, wide, expanded)
    with pytest.raises(InvalidConfig, match="n_layers is 513"):
        written(tmp_path, replace(DENSE, n_layers=513), [("x", torch.zeros(1))])
    with pytest.raises(AssertionError, match="adapters"):
        written(tmp_path, replace(DENSE, lora=LoraConfig(rank=2)))
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".tmp-model.gguf-{dead.pid}-0a0b").touch()
    path = written(tmp_path, DENSE)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("precision", ["f32", "q8_0"])
def test_weights_that_are_not_finite_are_not_written(tmp_path, value, precision):
    made = weights(DENSE)
    dict(made)["model.layers.1.mlp.up_proj.weight"][63, 31] = value
    with pytest.raises(InvalidConfig, match=r"ffn_up\.weight holds values that are not finite"):
        written(tmp_path, DENSE, made, precision=precision)
    assert not list(tmp_path.iterdir())


def test_what_eight_bits_cannot_hold_is_refused(tmp_path):
    made = weights(DENSE)
    dict(made)["model.layers.1.mlp.up_proj.weight"][63, 31] = 1e7
    with pytest.raises(InvalidConfig, match=r"blk\.1\.ffn_up\.weight has a value of .*f32 or bf16"):
        written(tmp_path, DENSE, made, precision="q8_0")
    assert not list(tmp_path.iterdir())


def test_our_record_must_agree_with_the_other_keys(tmp_path, monkeypatch):
    real = gguf_write.config_keys
    for change in ({"n_kv_heads": 4}, {"rmsnorm_eps": 1e-5}, {"rope_scaling": LLAMA3}):
        other = real(replace(DENSE, **change))[OWN_KEY]
        monkeypatch.setattr(gguf_write, "config_keys", lambda c, o=other: real(c) | {OWN_KEY: o})
        path = written(tmp_path, DENSE, force=True)
        with pytest.raises(InvalidSnapshot, match="describes another model"):
            GgufModel.open(path)
