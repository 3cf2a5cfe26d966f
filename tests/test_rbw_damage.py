"""A damaged or hostile weights file is refused at once, in the user's words."""

import json
import os
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from golden import (
    GOLDEN,
    golden_tensors,
    header_length,
    loaded,
    refused_at_once,
    with_config,
    with_header,
    written,
)

from fastbrain.errors import InvalidConfig, InvalidSnapshot, Io, Serde
from fastbrain.formats import rbw

OF = "the configuration in its header"


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "model.rbw")


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "model.rbw"
    for data, what in [
        (b"RBOPT001" + bytes(16), "an optimizer state: load_optimizer_state reads it"),
        (b"PK\x03\x04" + bytes(99), "another kind of file"),
        (b"x", "another kind of file"),
    ]:
        path.write_bytes(data)
        with pytest.raises(InvalidSnapshot) as caught:
            rbw.read_header(path)
        assert str(caught.value) == (
            f"{path} begins with {data[:8]!r}, not with b'RBWTS001': it is {what}"
        )


@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_tensors_names_both(file, change):
    data = bytearray(file.read_bytes())
    struct.pack_into("<Q", data, 16 + header_length(data), 27 + change)
    file.write_bytes(data)
    with pytest.raises(InvalidSnapshot) as caught:
        rbw.read_header(file)
    assert str(caught.value) == (
        f"{file} holds {27 + change} tensors, but {OF} implies 27; "
        "this file belongs to another architecture"
    )


def test_another_shape_names_both(file):
    # the second tensor's shape stands behind the first, of 5 x 4
    data = bytearray(file.read_bytes())
    struct.pack_into("<QQ", data, 16 + header_length(data) + 8 + 16 + 80, 4, 1)
    file.write_bytes(data)
    with pytest.raises(InvalidSnapshot) as caught:
        rbw.read_header(file)
    assert str(caught.value) == (
        f"{file}: tensor 1 (model.layers.0.input_layernorm.weight) is 4 x 1, but {OF} implies "
        "1 x 4; this file belongs to another architecture"
    )


def test_a_file_cut_anywhere_is_refused_before_a_value_is_read(tmp_path, file):
    whole = file.read_bytes()
    cut = tmp_path / "cut.rbw"
    for size in [*range(40), *range(40, len(whole), 13), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(Io, match=f"^{cut} is cut short: it has {size} bytes, but ") as caught:
            rbw.read_header(cut)
        assert str(caught.value).endswith("; copy it again, or go back to an older one")
    # the last cut knows how much there should be
    assert f"but {OF} implies {len(whole)};" in str(caught.value)


def test_a_file_that_shrinks_under_the_reader_is_told(file):
    header = rbw.read_header(file)
    os.truncate(file, file.stat().st_size - 8)
    views = [(name, torch.zeros_like(tensor)) for name, tensor in golden_tensors()]
    with pytest.raises(Io, match=f"^{file} became shorter while it was being read"):
        rbw.read_tensors(file, header, views)


def test_bytes_past_the_end_are_warned_of(file):
    with file.open("ab") as grown:
        grown.write(b"12345")
    with pytest.warns(UserWarning, match=f"^{file}: the 5 bytes after the last tensor are ignored"):
        header = rbw.read_header(file)
    assert header.config == GOLDEN


def test_what_cannot_be_read_is_told(tmp_path):
    missing = tmp_path / "none.rbw"
    with pytest.raises(Io, match=f"^cannot read {missing}: No such file or directory; check the"):
        rbw.read_header(missing)
    with pytest.raises(Io, match=f"^cannot read {tmp_path}: it is not a plain file"):
        rbw.read_header(tmp_path)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (b"{", Serde, "in its header, this is not valid JSON: "),
        (b"[]", Serde, "in its header, there must be an object, not []"),
        (b"{}", Serde, "in its header, the key config is missing"),
        (b'{"config":1,"config":2}', Serde, "in its header, its JSON has the key 'config' twice"),
        (b"[" * 100_000, Serde, "in its header, its JSON is nested deeper than 8 levels"),
        (b'{"a":' * 100_000, Serde, "in its header, its JSON is nested deeper than 8 levels"),
        (b'{"config":NaN}', Serde, "in its header, its JSON holds NaN, which is not a number"),
        (b"\xff", Serde, "in its header, this is not valid JSON: 'utf-8' codec"),
        (b'{"a":' + b"1" * 1_000_000 + b"}", Serde, "in its header, this is not valid JSON: "),
        (b" " * (1 << 20) + b" ", InvalidSnapshot, "says that its header has 1048577 bytes, more"),
    ],
    ids=["cut", "list", "empty", "twice", "brackets", "braces", "nan", "utf8", "digits", "long"],
)
def test_a_header_that_is_no_header_is_refused_at_once(file, text, kind, message):
    file.write_bytes(with_header(file.read_bytes(), text))
    refused_at_once(rbw.read_header, file, kind, message)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"vocab_size": 2**62}, InvalidSnapshot, f"is 5 x 4, but {OF} implies {2**62} x 4"),
        ({"d_model": 2**62}, InvalidSnapshot, f"is 5 x 4, but {OF} implies 5 x {2**62}"),
        (
            {"n_layers": 2**62},
            InvalidSnapshot,
            f"holds 27 tensors, but {OF} implies {9 * 2**62 + 9}",
        ),
        ({"num_experts": 2**62}, InvalidSnapshot, f"holds 27 tensors, but {OF} implies "),
        ({"n_layers": 2**63}, Serde, "in its header, config.n_layers must be a whole number below"),
        (
            {"moe_layers": [0] * 200_000},
            InvalidSnapshot,
            "(model.layers.0.mlp.gate.weight) is 6 x 4",
        ),
        ({"rope_base": float("nan")}, Serde, "in its header, its JSON holds NaN"),
        (
            {"rmsnorm_eps": 1e300},
            Serde,
            "config.rmsnorm_eps must be a finite 32-bit number, not 1e",
        ),
        (
            {"d_ff": 6.0},
            Serde,
            "config.d_ff must be a whole number below 2^63, such as 128, not 6.0",
        ),
        (
            {"n_kv_heads": 3},
            InvalidConfig,
            "in its header, n_heads must be a multiple of n_kv_heads",
        ),
        ({"causal": False}, InvalidConfig, "in its header, config.causal is false"),
        ({"lora": {"rank": 4}}, Serde, "in its header, config.lora lacks the key alpha"),
    ],
)
def test_a_hostile_configuration_is_refused_at_once(file, changes, kind, message):
    file.write_bytes(with_config(file.read_bytes(), **changes))
    refused_at_once(rbw.read_header, file, kind, message)


def test_a_million_tensors_need_their_bytes_before_a_list_of_them(file):
    data = with_config(file.read_bytes(), n_layers=10**8, moe_layers=[])
    data = bytearray(data)
    struct.pack_into("<Q", data, 16 + header_length(data), 2 + 9 * 10**8)
    file.write_bytes(data)
    refused_at_once(
        rbw.read_header,
        file,
        Io,
        f"but needs at least {24 + header_length(data) + 16 * (2 + 9 * 10**8)};",
    )


def test_a_length_that_wraps_around_is_refused(file):
    data = bytearray(file.read_bytes())
    for length in (2**63, 2**64 - 1, 2**40):
        struct.pack_into("<Q", data, 8, length)
        file.write_bytes(data)
        refused_at_once(
            rbw.read_header, file, InvalidSnapshot, f"says that its header has {length} bytes, more"
        )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer_step", -1, "optimizer_step must be a whole number below 2^63"),
        ("optimizer_step", 2**63, "optimizer_step must be a whole number below 2^63"),
        ("optimizer_step", 1.0, "optimizer_step must be a whole number below 2^63"),
        ("precision", "Q4", "precision must be F32 or Q8, not 'Q4'"),
        ("precision", [1], "precision must be F32 or Q8, not [1]"),
        ("optimizer", {"Muon": {}}, "optimizer is 'Muon'; known are Adam, Sgd, Lion"),
    ],
)
def test_the_other_keys_are_checked(file, key, value, message):
    data = file.read_bytes()
    found = json.loads(data[16 : 16 + header_length(data)]) | {key: value}
    file.write_bytes(with_header(data, json.dumps(found).encode()))
    refused_at_once(rbw.read_header, file, Serde, f"in its header, {message}")


def test_random_damage_never_escapes_as_another_error(tmp_path, file):
    whole = file.read_bytes()
    draw = np.random.default_rng(7)
    path = tmp_path / "damaged.rbw"
    for _ in range(200):
        data = bytearray(whole)
        for place in draw.integers(0, 800, size=draw.integers(1, 4)):
            data[place] = draw.integers(256)
        path.write_bytes(data)
        with suppress(InvalidSnapshot, InvalidConfig, Io, Serde):
            loaded(path)
