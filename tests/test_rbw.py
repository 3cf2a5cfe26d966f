"""Weights files are the crate's to the byte, and a damaged one is refused in the user's words."""

import hashlib
import json
import os
import re
import struct
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch

from fastbrain.config import LinearScaling, TransformerConfig
from fastbrain.errors import InvalidConfig, InvalidSnapshot, Io, Serde
from fastbrain.formats import header as keys
from fastbrain.formats import rbw
from fastbrain.optim import Optimizer
from fastbrain.precision import Precision
from fastbrain.transformer import pieces

GOLDEN = TransformerConfig(
    vocab_size=5,
    d_model=4,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=2,
    d_ff=6,
    moe_d_ff=3,
    num_experts=2,
    experts_per_token=1,
    moe_layers=(1,),
)
ADAM = Optimizer.adam(1e-2)
OF = "the configuration in its header"


def golden_tensors(config=GOLDEN):
    """Element i of tensor t is (((7i + 3t) mod 31) - 15) / 8."""
    for t, piece in enumerate(pieces(config)):
        i = torch.arange(piece.rows * piece.cols)
        values = ((7 * i + 3 * t) % 31 - 15) / 8
        yield piece.name, values.reshape(piece.rows, piece.cols)


def written(path, config=GOLDEN, optimizer=ADAM, step=3, precision=Precision.F32):
    rbw.write(path, config, optimizer, step, golden_tensors(config), precision)
    return path


def loaded(path):
    header = rbw.read_header(path)
    views = [(p.name, torch.full((p.rows, p.cols), torch.nan)) for p in pieces(header.config)]
    rbw.read_tensors(path, header, views)
    return header, views


def header_length(data):
    return struct.unpack_from("<Q", data, 8)[0]


def with_header(data, text):
    """The bytes of a file with another header text."""
    rest = data[16 + header_length(data) :]
    return data[:8] + struct.pack("<Q", len(text)) + text + rest


def with_config(data, **changes):
    found = json.loads(data[16 : 16 + header_length(data)])
    found["config"] |= changes
    return with_header(data, json.dumps(found).encode())


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "model.rbw")


@pytest.mark.parametrize(
    ("precision", "size", "digest"),
    [
        (Precision.F32, 1_736, "0e6d32294ab93cd0"),
        (Precision.Q8, 1_092, "e6ddbaba00eb4565"),
    ],
)
def test_golden_bytes(tmp_path, precision, size, digest):
    data = written(tmp_path / "model.rbw", precision=precision).read_bytes()
    body = data[16 + header_length(data) :]
    assert len(body) == size
    assert hashlib.sha256(body).hexdigest().startswith(digest)


def test_a_file_begins_with_its_header(file):
    data = file.read_bytes()
    text = keys.dumps(keys.config_object(GOLDEN))
    optimizer = keys.dumps(keys.optimizer_object(ADAM))
    expected = f'{{"config":{text},"optimizer":{optimizer},"optimizer_step":3,"precision":"F32"}}'
    assert data[:8] == b"RBWTS001"
    assert data[16 : 16 + header_length(data)].decode() == expected
    assert data[16 + len(expected) :][:24] == struct.pack("<QQQ", 27, 5, 4)


@pytest.mark.parametrize("optimizer", [ADAM, Optimizer.sgd(1.0), Optimizer.lion(2e-3)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_survives(tmp_path, optimizer, tied):
    config = TransformerConfig(
        vocab_size=7,
        d_model=4,
        n_layers=2,
        n_heads=2,
        n_kv_heads=2,
        head_dim=2,
        d_ff=6,
        moe_layers=(),
        tie_embeddings=tied,
        rope_scaling=LinearScaling(2.0),
    )
    path = written(tmp_path / "model.rbw", config, optimizer, 2**40)
    header, views = loaded(path)
    assert (header.config, header.optimizer, header.optimizer_step, header.precision) == (
        config,
        optimizer,
        2**40,
        Precision.F32,
    )
    for (_, view), (name, truth) in zip(views, golden_tensors(config), strict=True):
        assert torch.equal(view, truth), name


def test_views_of_fused_parameters_are_written_and_filled(tmp_path):
    wide = {name: torch.zeros(tensor.shape[0], 9) for name, tensor in golden_tensors()}
    views = [(name, wide[name][:, : tensor.shape[1]]) for name, tensor in golden_tensors()]
    path = written(tmp_path / "model.rbw")
    rbw.read_tensors(path, rbw.read_header(path), views)
    rbw.write(tmp_path / "again.rbw", GOLDEN, ADAM, 3, views, Precision.F32)
    assert (tmp_path / "again.rbw").read_bytes() == path.read_bytes()
    assert all(not tensor[:, 6:].any() for tensor in wide.values())


def test_a_parameter_that_needs_a_gradient_is_written_and_filled(file):
    views = [(n, torch.nn.Parameter(torch.zeros_like(t))) for n, t in golden_tensors()]
    rbw.read_tensors(file, rbw.read_header(file), views)
    before = file.read_bytes()
    rbw.write(file, GOLDEN, ADAM, 3, views, Precision.F32)
    assert file.read_bytes() == before


def test_a_matrix_of_many_blocks_survives(tmp_path, monkeypatch):
    monkeypatch.setattr("fastbrain.formats.binary._BLOCK_BYTES", 40)
    for precision in Precision:
        header, views = loaded(written(tmp_path / "model.rbw", precision=precision))
        assert header.precision is precision
        for (_, view), (name, truth) in zip(views, golden_tensors(), strict=True):
            scale = truth.abs().amax(dim=1, keepdim=True)
            worst = 0 if precision is Precision.F32 else scale / 253
            assert ((view - truth).abs() <= worst).all(), name


def test_eight_bits_round_half_away_from_zero():
    packed = rbw.quantize(np.array([[127, 0.5, -0.5, 1.5, 2.5]], np.float32))
    assert packed[:, :4].tobytes() == struct.pack("<f", 1.0)
    assert packed[:, 4:].view(np.int8).tolist() == [[127, 1, -1, 2, 3]]
    # 0.49999997 + 0.5 is 1 in FP32
    below = np.nextafter(np.float32(0.5), np.float32(0))
    packed = rbw.quantize(np.array([[127, below, -below]], np.float32))
    assert packed[:, 4:].view(np.int8).tolist() == [[127, 0, 0]]


def test_a_row_without_magnitude_has_scale_zero():
    tiny = np.float32(1e-45)  # its scale underflows
    packed = rbw.quantize(np.array([[0, -0.0], [tiny, 0], [-127, 127]], np.float32))
    assert not packed[:2].any()
    assert rbw.dequantize(packed).tolist() == [[0, 0], [0, 0], [-127, 127]]


def test_eight_bits_are_scaled_in_fp32():
    values = np.random.default_rng(1).normal(size=(50, 33)).astype(np.float32)
    packed = rbw.quantize(values)
    scale = (np.abs(values).max(axis=1) / np.float32(127)).astype("<f4")
    q = packed[:, 4:].view(np.int8)
    assert packed[:, :4].tobytes() == scale.tobytes()
    assert (np.abs(q).max(axis=1) == 127).all()
    assert np.array_equal(rbw.dequantize(packed), q.astype(np.float32) * scale[:, None])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_eight_bits_cannot_hold_is_refused_and_the_old_file_stays(file, bad):
    before = file.read_bytes()
    tensors = list(golden_tensors())
    tensors[4][1][1, 2] = bad
    with pytest.raises(InvalidConfig) as caught:
        rbw.write(file, GOLDEN, ADAM, 3, tensors, Precision.Q8)
    assert str(caught.value) == (
        f"cannot write {file} as Q8: model.layers.0.self_attn.v_proj.weight holds NaN or infinite "
        "values, which 8 bits cannot; save with Precision.F32 to examine them, or go back to a "
        "checkpoint from before they appeared"
    )
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == ["model.rbw"]
    rbw.write(file, GOLDEN, ADAM, 3, tensors, Precision.F32)
    assert torch.allclose(loaded(file)[1][4][1], tensors[4][1], equal_nan=True)


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


def test_the_number_of_tensors_follows_every_setting():
    for moe_layers in [(), (0,), (0, 2)]:
        for switch in [True, False]:
            config = TransformerConfig(
                n_layers=3,
                num_experts=3,
                moe_layers=moe_layers,
                shared_expert=switch,
                tie_embeddings=not switch,
            )
            assert rbw._tensors(config) == len(pieces(config))


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
    refused_at_once(file, kind, message)


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
        ({"lora": {"rank": 4}}, InvalidConfig, "in its header, config.lora is {'rank': 4}"),
    ],
)
def test_a_hostile_configuration_is_refused_at_once(file, changes, kind, message):
    file.write_bytes(with_config(file.read_bytes(), **changes))
    refused_at_once(file, kind, message)


def test_a_million_tensors_need_their_bytes_before_a_list_of_them(file):
    data = with_config(file.read_bytes(), n_layers=10**8, moe_layers=[])
    data = bytearray(data)
    struct.pack_into("<Q", data, 16 + header_length(data), 2 + 9 * 10**8)
    file.write_bytes(data)
    refused_at_once(
        file, Io, f"but needs at least {24 + header_length(data) + 16 * (2 + 9 * 10**8)};"
    )


def test_a_length_that_wraps_around_is_refused(file):
    data = bytearray(file.read_bytes())
    for length in (2**63, 2**64 - 1, 2**40):
        struct.pack_into("<Q", data, 8, length)
        file.write_bytes(data)
        refused_at_once(file, InvalidSnapshot, f"says that its header has {length} bytes, more")


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
    refused_at_once(file, Serde, f"in its header, {message}")


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


def refused_at_once(path, kind, message):
    started = time.process_time()
    with pytest.raises(kind, match=re.escape(message)) as caught:
        rbw.read_header(path)
    assert time.process_time() - started < 1
    assert str(caught.value).startswith(str(path))
    assert type(caught.value) is kind
    assert str(caught.value).isascii()
    tracemalloc.start()  # which makes it several times slower
    try:
        with pytest.raises(kind):
            rbw.read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6
