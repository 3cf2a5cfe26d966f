"""GGUF files come in as what llama.cpp would run, or are refused by the name of what is wrong."""

import math
import struct
import sys

import numpy as np
import pytest
import torch
from gguf_files import BF16, F16, Q4_0, Q4_1, Q4_K, Q8_0, SMALL, file, ramp, read, tensors, values

from fastbrain.config import LinearScaling, Llama3Scaling
from fastbrain.errors import InvalidConfig, InvalidSnapshot
from fastbrain.formats.gguf_config import OWN_KEY
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.formats.header import config_object
from fastbrain.formats.strict_json import dumps

pytest.importorskip("gguf")


def opened(folder, values, tensors):
    return GgufModel.open(file(folder, values, tensors)).config


def test_a_configuration_is_read_from_the_keys(tmp_path):
    assert opened(tmp_path, values(), tensors()) == SMALL


def test_every_tensor_is_found_under_its_name(tmp_path):
    found = read(file(tmp_path, values(), tensors()))
    names = list(tensors())
    ours = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.1.attn_norm": "model.layers.1.input_layernorm",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
        "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
        "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
    }
    assert len(found) == len(names)
    for theirs, name in ours.items():
        view = found[f"{name}.weight"]
        n = names.index(f"{theirs}.weight")
        assert view.flatten().tolist() == ramp(n, (view.numel(),)).tolist(), name


@pytest.mark.parametrize(("part", "heads"), [("q", 4), ("k", 2)])
def test_rows_of_queries_and_keys_come_back_in_halves(tmp_path, part, heads):
    found = read(file(tmp_path, values(), tensors()))
    theirs = ramp(list(tensors()).index(f"blk.1.attn_{part}.weight"), (6 * heads, 32))
    ours = found[f"model.layers.1.self_attn.{part}_proj.weight"]
    for head in range(heads):
        for pair in range(3):
            # the pair that one frequency turns is 2j and 2j + 1 there, j and j + K/2 here
            for half in range(2):
                expected = theirs[6 * head + 2 * pair + half]
                assert ours[6 * head + pair + 3 * half].tolist() == expected.tolist()


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def block_q4_0(n):
    # scale n + 1, nibbles 0 to 15 up and down
    data = bytes(j | (15 - j) << 4 for j in range(16))
    return half(n + 1) + data, [(j - 8) * (n + 1) for j in [*range(16), *range(15, -1, -1)]]


def block_q4_1(n):
    data = bytes(j | (15 - j) << 4 for j in range(16))
    weights = [j * 0.5 - n for j in [*range(16), *range(15, -1, -1)]]
    return half(0.5) + half(-n) + data, weights


def block_q8_0(n):
    numbers = [4 * j - 64 + n for j in range(32)]
    return half(0.25) + struct.pack("<32b", *numbers), [each / 4 for each in numbers]


def block_f16(n):
    numbers = [n + j / 4 for j in range(32)]
    return struct.pack("<32e", *numbers), numbers


def block_bf16(n):
    numbers = [n + j / 4 for j in range(32)]
    # the upper half of an FP32 number
    return b"".join(struct.pack("<f", each)[2:] for each in numbers), numbers


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        pytest.param(Q4_0, block_q4_0, id="Q4_0"),
        pytest.param(Q4_1, block_q4_1, id="Q4_1"),
        pytest.param(Q8_0, block_q8_0, id="Q8_0"),
        pytest.param(F16, block_f16, id="F16"),
        pytest.param(BF16, block_bf16, id="BF16"),
    ],
)
def test_blocks_of_every_type_are_what_was_packed(tmp_path, kind, block):
    made = [block(n % 7) for n in range(2 * 32)]
    data = b"".join(each for each, _ in made)
    changed = tensors(blk__0__ffn_down__weight=(kind, (32, 64), data))
    found = read(file(tmp_path, values(), changed))["model.layers.0.mlp.down_proj.weight"]
    assert found.flatten().tolist() == [value for _, each in made for value in each]


def test_what_a_file_may_leave_out_has_the_value_of_llama_cpp(tmp_path):
    left_out = {
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.attention.head_count_kv": None,
        "llama.rope.freq_base": None,
        "llama.rope.dimension_count": None,
    }
    square = {
        f"blk__{i}__attn_{part}__weight": (0, (32, 32), bytes(4096))
        for i in range(2)
        for part in ("q", "k", "v", "output")
    }
    config = opened(tmp_path, values(**left_out), tensors(**square))
    assert (config.n_kv_heads, config.head_dim, config.rope_base) == (4, 8, 10_000.0)


def test_a_file_without_a_head_is_tied(tmp_path):
    config = opened(tmp_path, values(), tensors(output__weight=None))
    assert config.tie_embeddings


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling_is_read(tmp_path, keys):
    assert opened(tmp_path, values(**keys), tensors()).rope_scaling == LinearScaling(4.0)


def llama3(factor: float) -> np.ndarray:
    """What Llama 3's files divide the frequencies of 128 channels by, as its authors wrote it."""
    found = []
    for j in range(64):
        wavelength = 2 * math.pi * 500_000.0 ** (2 * j / 128)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, "<f4")


def llama3_file(folder, factors):
    """A file with the heads of Llama 3."""
    heads = {
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": 128,
        "llama.attention.value_length": 128,
        "llama.rope.dimension_count": 128,
        "llama.rope.freq_base": 500_000.0,
    }
    wide = {
        f"blk__{i}__attn_{part}__weight": (0, shape, bytes(128 * 128))
        for i in range(2)
        for part, shape in {
            "q": (128, 32),
            "k": (128, 32),
            "v": (128, 32),
            "output": (32, 128),
        }.items()
    }
    changed = tensors(rope_freqs__weight=(0, factors.shape, factors.tobytes()), **wide)
    return file(folder, values(**heads), changed)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rule_of_published_llamas_is_recognized(tmp_path, factor):
    config = GgufModel.open(llama3_file(tmp_path, llama3(factor))).config
    assert config.rope_scaling == Llama3Scaling(factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "change",
    [
        lambda factors: factors[:-1],
        lambda factors: np.where(np.arange(64) == 32, factors * 1.001, factors),
        lambda factors: factors * 0,
        lambda factors: factors[::-1],
    ],
    ids=["too few", "one off", "zeros", "reversed"],
)
def test_other_factors_are_refused(tmp_path, change):
    factors = np.ascontiguousarray(change(llama3(8.0)), "<f4")
    with pytest.raises(InvalidConfig, match=r"rope_freqs\.weight scales"):
        GgufModel.open(llama3_file(tmp_path, factors))


def test_factors_of_one_scale_nothing(tmp_path):
    factors = (0, (3,), np.ones(3, "<f4").tobytes())
    assert opened(tmp_path, values(), tensors(rope_freqs__weight=factors)) == SMALL


def test_too_few_factors_of_one_are_refused(tmp_path):
    factors = (0, (2,), np.ones(2, "<f4").tobytes())
    with pytest.raises(InvalidConfig, match=r"rope_freqs\.weight scales"):
        opened(tmp_path, values(), tensors(rope_freqs__weight=factors))


def test_factors_that_our_own_key_does_not_tell_of_are_refused(tmp_path):
    own = {OWN_KEY: dumps(config_object(SMALL))}
    assert opened(tmp_path, values(**own), tensors()) == SMALL
    factors = (0, (3,), np.full(3, 2, "<f4").tobytes())
    with pytest.raises(InvalidSnapshot, match="describes another model than the file's other keys"):
        opened(tmp_path, values(**own), tensors(rope_freqs__weight=factors))


def test_a_dense_file_may_say_that_it_uses_no_experts(tmp_path):
    keys = {"llama.expert_count": 0, "llama.expert_used_count": 0}
    assert opened(tmp_path, values(**keys), tensors()) == SMALL


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "mamba", "general.architecture is 'mamba'"),
        ("general.type", "adapter", "general.type"),
        ("split.count", 3, "llama-gguf-split --merge"),
        ("llama.expert_count", 8, "llama.expert_count is 8"),
        ("llama.attention.sliding_window", 4096, "llama.attention.sliding_window"),
        ("llama.logit_scale", 0.5, "llama.logit_scale"),
        ("llama.rope.scaling.type", "yarn", "rope.scaling.type is 'yarn'"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count is 4"),
        ("llama.attention.value_length", 8, "value_length is 8"),
        ("llama.attention.head_count_kv", [2, 1], "one whole number"),
        ("llama.context_length", 1 << 30, "max_seq_len must be at most 2,097,152"),
        ("llama.vocab_size", 41, "vocab_size is 41"),
        ("llama.block_count", 513, "block_count is 513"),
        ("llama.attention.head_count", 3, "n_heads must be a multiple"),
        ("llama.rope.freq_base", "10", "freq_base must be a number"),
    ],
)
def test_a_setting_that_fastbrain_does_not_have_is_named(tmp_path, key, value, words):
    with pytest.raises(InvalidConfig) as caught:
        opened(tmp_path, values(**{key: value}), tensors())
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_key_is_named(tmp_path):
    changed = values(**{"llama.attention.layer_norm_rms_epsilon": None})
    with pytest.raises(InvalidSnapshot, match=r"llama\.attention\.layer_norm_rms_epsilon is miss"):
        opened(tmp_path, changed, tensors())


def test_a_type_that_fastbrain_cannot_read_is_named(tmp_path):
    changed = tensors(blk__0__attn_v__weight=(Q4_K, (12, 32), bytes(256)))
    with pytest.raises(InvalidConfig, match=r"blk\.0\.attn_v\.weight\S* is of type Q4_K.*Q4_1"):
        opened(tmp_path, values(), changed)


def test_up_to_five_tensors_of_each_fault_are_named(tmp_path):
    changes = {f"blk__0__attn_{each}__bias": (0, (32,), bytes(128)) for each in "qkvabc"}
    changes |= {"blk__1__ffn_up__weight": None, "output_norm__weight": (0, (31,), bytes(124))}
    with pytest.raises(InvalidSnapshot) as caught:
        opened(tmp_path, values(), tensors(**changes))
    told = str(caught.value)
    assert "it lacks 1 tensors: blk.1.ffn_up.weight" in told
    assert "6 tensors that fastbrain has no place for, some of them biases" in told
    assert told.count(".bias") == 5
    assert "and 1 more" in told
    assert "output_norm.weight is (31,) and should be (32,)" in told


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path, number):
    data = ramp(0, (64, 32))
    data[63, 31] = number
    path = file(tmp_path, values(), tensors(blk__1__ffn_up__weight=(0, (64, 32), data.tobytes())))
    with pytest.raises(InvalidSnapshot, match=r"blk\.1\.ffn_up\.weight has values"):
        read(path)


def test_a_model_of_another_configuration_is_not_filled(tmp_path):
    opened = GgufModel.open(file(tmp_path, values(), tensors()))
    with pytest.raises(InvalidConfig, match="not those of a model with this configuration"):
        opened.read_into([("model.norm.weight", torch.zeros(1, 32))])


def test_without_the_package_the_way_out_is_told(tmp_path, monkeypatch):
    path = file(tmp_path, values(), tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'fastbrain\[hf\]'"):
        GgufModel.open(path)
