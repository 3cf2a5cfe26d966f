"""A configuration survives its JSON, in the crate's spelling, and bad JSON is told in words."""

import dataclasses
import json
import random
import re
import struct
import time

import numpy as np
import pytest

from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig
from fastbrain.errors import InvalidConfig, Serde
from fastbrain.formats import header
from fastbrain.formats.strict_json import loads
from fastbrain.optim import Adam, Lion, Optimizer

SCALINGS = [None, LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 32)]

DEFAULTS = (
    '{"vocab_size":32000,"d_model":512,"n_layers":8,"n_heads":8,"n_kv_heads":2,"head_dim":64,'
    '"d_ff":1408,"moe_d_ff":352,"num_experts":8,"experts_per_token":2,"moe_layers":[2,3,4,5,6,7],'
    '"shared_expert":true,"max_seq_len":2048,"rope_base":10000.0,"rmsnorm_eps":0.000001,'
    '"tie_embeddings":true,"causal":true,"aux_loss_weight":0.01,"router_z_loss_weight":0.001,'
    '"lora":null}'
)


def config_with(**changes):
    return json.loads(DEFAULTS) | changes


def test_the_default_configuration_is_spelled_as_the_crate_spells_it():
    assert header.dumps(header.config_object(TransformerConfig())) == DEFAULTS


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (SCALINGS[1], '{"rope_type":"linear","factor":4.0}'),
        (
            SCALINGS[2],
            '{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,'
            '"original_max_position_embeddings":32}',
        ),
    ],
)
def test_rope_scaling_stands_behind_rope_base_when_it_is_set(scaling, text):
    written = header.dumps(header.config_object(TransformerConfig(rope_scaling=scaling)))
    assert f'"rope_base":10000.0,"rope_scaling":{text},"rmsnorm_eps"' in written


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_configuration_survives(scaling):
    config = TransformerConfig(
        vocab_size=61,
        n_layers=3,
        moe_layers=(0, 2),
        shared_expert=False,
        tie_embeddings=False,
        rope_base=5e5,
        rmsnorm_eps=3e-7,
        aux_loss_weight=0.0,
        rope_scaling=scaling,
    )
    text = header.dumps(header.config_object(config))
    assert header.config_from_object(loads(text.encode())) == config


def test_every_field_of_a_configuration_is_in_the_file():
    # a field that is added to the class and not to the table would be lost silently
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(header.config_object(TransformerConfig(rope_scaling=SCALINGS[1]))) == fields | {
        "causal",
        "lora",
    }


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            Optimizer.adam(3e-4),
            '{"Adam":{"learning_rate":0.0003,"beta1":0.9,"beta2":0.999,"epsilon":1e-8,'
            '"weight_decay":0.0}}',
        ),
        (Optimizer.sgd(1.0), '{"Sgd":{"learning_rate":1.0}}'),
        (
            Optimizer.lion(2e-3, weight_decay=0.1),
            '{"Lion":{"learning_rate":0.002,"beta1":0.9,"beta2":0.99,"weight_decay":0.1}}',
        ),
    ],
)
def test_an_optimizer_survives(optimizer, text):
    assert header.dumps(header.optimizer_object(optimizer)) == text
    again = header.optimizer_from_object(loads(text.encode()))
    assert type(again) is type(optimizer)
    assert again == optimizer


def test_vectors_decay_after_a_load_because_the_file_does_not_say():
    found = header.optimizer_from_object(
        header.optimizer_object(Optimizer.adam(1e-3, decay_vectors=False))
    )
    assert isinstance(found, Adam)
    assert found.decay_vectors


def test_adam_may_leave_out_its_weight_decay_and_lion_may_not():
    settings = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99}
    adam = header.optimizer_from_object({"Adam": {**settings, "epsilon": 1e-8}})
    assert isinstance(adam, Adam)
    assert adam.weight_decay == 0
    with pytest.raises(Serde, match=r"optimizer\.Lion lacks the key weight_decay"):
        header.optimizer_from_object({"Lion": settings})
    assert isinstance(header.optimizer_from_object({"Lion": {**settings, "weight_decay": 0}}), Lion)


@pytest.mark.parametrize(
    ("value", "digits"),
    [
        (10000.0, "10000.0"),
        (500000.0, "500000.0"),
        (16777216.0, "16777216.0"),
        (0.0, "0.0"),
        (1.0, "1.0"),
        (0.1, "0.1"),
        (0.0010983356, "0.0010983356"),
        (1e-6, "0.000001"),
        (1.5e-6, "0.0000015"),
        (9.99999e-7, "9.99999e-7"),
        (1e-7, "1e-7"),
        (1.5e-8, "1.5e-8"),
        (-1.5e-8, "-1.5e-8"),
        (float(np.float32(0.1)), "0.1"),
        (3.4028234663852886e38, "340282350000000000000000000000000000000.0"),
        (1e-45, "1e-45"),
    ],
)
def test_a_float_is_the_shortest_decimal_of_its_32_bits(value, digits):
    assert header.dumps(value) == digits


def test_any_float_reads_back_to_the_same_bits():
    draw = random.Random(1)
    for bits in (draw.getrandbits(31) for _ in range(2_000)):
        [value] = struct.unpack("<f", struct.pack("<I", bits))
        if np.isfinite(value):
            text = header.dumps(value)
            assert struct.pack("<f", json.loads(text)) == struct.pack("<I", bits), text
            assert re.fullmatch(r"\d+\.\d+|[1-9](\.\d+)?e-\d+", text), text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_what_has_no_32_bit_value_is_not_written(value):
    with pytest.raises(InvalidConfig, match=r"learning_rate must be a finite 32-bit number, not "):
        header.dumps(header.optimizer_object(Optimizer.sgd(1.0)) | {"learning_rate": value})


def test_a_64_bit_float_and_an_integer_read_as_a_float_field():
    found = header.config_from_object(
        config_with(rope_base=10000, rmsnorm_eps=9.999999974752427e-7)
    )
    assert (found.rope_base, found.rmsnorm_eps) == (10000.0, 1e-6)
    assert found == TransformerConfig()


def test_unknown_keys_are_ignored():
    later = config_with(sliding_window=128, notes={"deep": [[[1]]]})
    assert header.config_from_object(later) == TransformerConfig()


@pytest.mark.parametrize("absent", ["rope_scaling", "causal", "lora"])
def test_what_older_files_lack_may_be_absent(absent):
    older = config_with(rope_scaling=None)
    del older[absent]
    assert header.config_from_object(older) == TransformerConfig()


@pytest.mark.parametrize(
    "key", [key for key in json.loads(DEFAULTS) if key not in ("causal", "lora")]
)
def test_any_other_key_must_be_there(key):
    lacking = config_with()
    del lacking[key]
    with pytest.raises(Serde, match=f"config lacks the key {key}$"):
        header.config_from_object(lacking)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"d_model": 128.5},
            "config.d_model must be a whole number below 2^63, such as 128, not 128.5",
        ),
        (
            {"d_model": 128.0},
            "config.d_model must be a whole number below 2^63, such as 128, not 128.0",
        ),
        (
            {"d_model": "128"},
            "config.d_model must be a whole number below 2^63, such as 128, not '128'",
        ),
        (
            {"d_model": True},
            "config.d_model must be a whole number below 2^63, such as 128, not True",
        ),
        ({"d_model": -1}, "config.d_model must be a whole number below 2^63, such as 128, not -1"),
        (
            {"d_ff": 2**63},
            f"config.d_ff must be a whole number below 2^63, such as 128, not {2**63}",
        ),
        ({"moe_layers": 3}, "config.moe_layers must be a list of whole numbers, not 3"),
        ({"moe_layers": [1, 2.0]}, "config.moe_layers[1] must be a whole number below 2^63"),
        ({"shared_expert": 1}, "config.shared_expert must be true or false, not 1"),
        ({"rope_base": "1e4"}, "config.rope_base must be a number, not '1e4'"),
        ({"rope_base": 1e39}, "config.rope_base must be a finite 32-bit number, not 1e+39"),
        ({"rope_base": 10**400}, "config.rope_base must be a finite 32-bit number, not 1000"),
        ({"causal": None}, "config.causal must be true or false, not None"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "config.rope_scaling must be null or have rope_type linear or llama3, "
            "not {'rope_type': 'yarn'}",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.rope_scaling lacks the key factor"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(change, message):
    with pytest.raises(Serde, match="^" + re.escape(message)):
        header.config_from_object(config_with(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "config.causal is false: this is a bidirectional model"),
        ({"lora": {"rank": 0, "alpha": 8.0, "seed": 3}}, "lora.rank must be at least 1, got 0"),
        ({"head_dim": 63}, "head_dim must be even"),
    ],
)
def test_a_model_that_we_cannot_run_is_refused_by_name(change, message):
    with pytest.raises(InvalidConfig, match="^" + re.escape(message)):
        header.config_from_object(config_with(**change))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"Muon": {}}, "optimizer is 'Muon'; known are Adam, Sgd, Lion"),
        ({"Adam": {}, "Sgd": {}}, "optimizer must be an object with one key"),
        ([], "optimizer must be an object with one key"),
        ({"Sgd": None}, "optimizer.Sgd must be an object, not None"),
        ({"Sgd": {}}, "optimizer.Sgd lacks the key learning_rate"),
        ({"Sgd": {"learning_rate": "a"}}, "optimizer.Sgd.learning_rate must be a number, not 'a'"),
    ],
)
def test_an_optimizer_that_is_none_is_named(value, message):
    with pytest.raises(Serde, match="^" + re.escape(message)):
        header.optimizer_from_object(value)


def test_an_optimizer_with_an_impossible_setting_is_refused():
    with pytest.raises(InvalidConfig, match=r"learning_rate must be a finite number .*, got -0\.1"):
        header.optimizer_from_object({"Sgd": {"learning_rate": -0.1}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "this is not valid JSON: Expecting value"),
        (b'{"a":1', "this is not valid JSON: "),
        (b'{"a":1} x', "this is not valid JSON: Extra data"),
        (b'"\xff"', "this is not valid JSON: 'utf-8' codec"),
        (b'{"a":1,"b":{"c":1,"c":2}}', "its JSON has the key 'c' twice in one object"),
        (b'{"a":NaN}', "its JSON holds NaN, which is not a number"),
        (b'{"a":-Infinity}', "its JSON holds -Infinity, which is not a number"),
        (b'{"a":' + b"9" * 5_000 + b"}", "this is not valid JSON: "),
        (b"[" * 100_000, "its JSON is nested deeper than 8 levels"),
        (b'{"a":' * 100_000, "its JSON is nested deeper than 8 levels"),
        (b'{"a":' + b"[" * 8 + b"]" * 8 + b"}", "its JSON is nested deeper than 8 levels"),
        (b'"' + b"[" * 2_000_000, "this is not valid JSON: "),
        (b'"\\' * 1_000_000, "this is not valid JSON: "),
        (b'{"' + b"\\u0041" * 300_000, "this is not valid JSON: "),
    ],
    ids=range(14),
)
def test_bad_json_is_refused_at_once(data, message):
    started = time.process_time()
    with pytest.raises(Serde, match="^" + re.escape(message)):
        loads(data)
    assert time.process_time() - started < 1


def test_brackets_inside_a_text_are_no_nesting():
    assert loads(b'{"a\\"[[[[[[[[[[":["{{{{{{{{{{"]}') == {'a"[[[[[[[[[[': ["{{{{{{{{{{"]}
    assert loads(b"[[[[[[[[1]]]]]]]]") == [[[[[[[[1]]]]]]]]
