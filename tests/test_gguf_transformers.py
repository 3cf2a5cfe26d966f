"""transformers reads our GGUF files to the same logits."""

from dataclasses import replace

import pytest
import torch
from gguf_files import by_transformers
from models import DENSE, model, random_ids

from fastbrain.formats.gguf_write import write_gguf

pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

MODELS = {
    "tied": DENSE,
    "untied": replace(DENSE, tie_embeddings=False, rope_base=500.0, rmsnorm_eps=1e-2),
    "one key-value head": replace(DENSE, n_kv_heads=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal(tmp_path, name):
    ours = model(MODELS[name])
    write_gguf(tmp_path / "model.gguf", ours.config, ours.weights())
    theirs = by_transformers(tmp_path / "model.gguf")
    ids = random_ids(2, 32)
    with torch.no_grad():
        expected, found = ours.module(ids), theirs(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (found.argmax(-1) == expected.argmax(-1)).all()
