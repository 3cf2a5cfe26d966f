"""Models with stretched rotary frequencies, as version 4.0.0 of the reference system wrote them."""

import numpy as np
import pytest
import torch
from fixture_models import (
    FIXTURES,
    LOGITS,
    LOSS,
    Reference,
    assert_loss,
    assert_values,
    read_json,
)

from fastbrain import Precision, TransformerConfig, TransformerLm
from fastbrain.config import LinearScaling, Llama3Scaling

FOLDER = FIXTURES / "rope"
SCALINGS = {"linear": LinearScaling(4.0), "llama3": Llama3Scaling(8.0, 1.0, 4.0, 32)}


@pytest.fixture(scope="module", params=SCALINGS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return TransformerLm.load_bin(FOLDER / f"{kind}.rbw")


@pytest.fixture(scope="module")
def batch():
    return Reference("dense").corpus.batch(5, 2, 60)


def test_the_header_names_the_scaling(kind, model):
    assert model.config.rope_scaling == SCALINGS[kind]


def test_a_seed_gives_the_very_file(kind, tmp_path):
    config = TransformerConfig(
        vocab_size=61,
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=64,
        moe_layers=(),
        max_seq_len=64,
        rope_scaling=SCALINGS[kind],
    )
    built = TransformerLm.builder().config(config).seed(21).build()
    built.save_bin(tmp_path / "built.rbw", Precision.F32)
    assert (tmp_path / "built.rbw").read_bytes() == (FOLDER / f"{kind}.rbw").read_bytes()


def test_a_scaled_model_is_written_with_the_same_bytes(kind, model, tmp_path):
    model.save_bin(tmp_path / "again.rbw", Precision.F32)
    assert (tmp_path / "again.rbw").read_bytes() == (FOLDER / f"{kind}.rbw").read_bytes()


def test_logits_of_a_scaled_model_agree(kind, model, batch):
    with torch.no_grad():
        logits = model.module(batch.ids)
    expected = torch.from_numpy(np.fromfile(FOLDER / f"{kind}.logits.f32", dtype="<f4"))
    assert_values(logits, expected, LOGITS)


def test_losses_of_a_scaled_model_agree(kind, model, batch):
    assert_loss(model.evaluate(batch), read_json("rope/expected.json")["evaluate"][kind], LOSS)
