"""Weights files are the crate's to the byte, and give back what was put into them."""

import hashlib
import os
import struct

import numpy as np
import pytest
import torch
from golden import ADAM, GOLDEN, golden_tensors, header_length, loaded, written

from fastbrain.config import LinearScaling, TransformerConfig
from fastbrain.errors import InvalidConfig
from fastbrain.formats import header as keys
from fastbrain.formats import rbw
from fastbrain.optim import Optimizer
from fastbrain.precision import Precision
from fastbrain.transformer import pieces


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
