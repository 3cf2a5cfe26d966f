"""transformers computes with an exported directory what the model itself computes."""

import pytest
import torch
from fixture_models import FIXTURES
from hf_directories import EXPORTS, MODELS, exported, imported, logits_scale
from models import DENSE, MOE, random_ids
from texts import small_tokenizer

from fastbrain import Sampler, TransformerLm
from fastbrain.formats import hf_config, hf_export, hf_layout
from fastbrain.formats.hf_export import write_directory
from fastbrain.tokens.tokenizer_files import TokenizerFiles

transformers = pytest.importorskip("transformers")

AGREEMENT = 1e-4  # of the largest logit
TRAINED = [
    ("dense/trained", "llama"),
    ("moe_shared/trained", "ernie4_5_moe"),
    ("sgd/trained", "qwen2_moe"),
    ("rope/llama3", "llama"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("moe_shared/trained", "qwen2_moe"),
            ("moe_untied/trained", "ernie4_5_moe"),
            ("moe_untied/trained", "qwen2_moe"),
            ("one_expert/trained", "ernie4_5_moe"),
            ("one_expert/trained", "qwen2_moe"),
            ("sgd/trained", "ernie4_5_moe"),
            ("head64/trained", "ernie4_5_moe"),
            ("head64/trained", "qwen2_moe"),
            ("rope/linear", "llama"),
        )
    ),
]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


def loaded(directory, dtype=torch.float32):
    found = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return found.eval()


@torch.no_grad()
def error(other, model, rows=3, length=24):
    """The largest difference of logits, as a fraction of the largest."""
    ids = random_ids(rows, length, vocab=model.config.vocab_size)
    ours, theirs = model.module(ids), other(ids).logits
    return float((ours.double() - theirs.double()).abs().max() / logits_scale(ours))


@torch.no_grad()
def goes_on_alike(other, prompt, answer):
    """Whether the likeliest token after each prefix is the next one of the answer."""
    logits = other(torch.tensor([prompt + answer[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == answer


@pytest.mark.filterwarnings("ignore:head_dim is")
@pytest.mark.parametrize(("name", "arch"), EXPORTS)
def test_fresh_models_compute_the_same_in_transformers(tmp_path, name, arch):
    model = exported(tmp_path / "out", MODELS[name], arch=arch)
    other = loaded(tmp_path / "out")
    assert other.config.model_type == arch
    assert error(other, model) <= AGREEMENT


@pytest.mark.filterwarnings("ignore:head_dim is")
@pytest.mark.parametrize(("name", "arch"), TRAINED)
def test_trained_models_answer_the_same_in_transformers(tmp_path, name, arch):
    model = TransformerLm.load_bin(FIXTURES / f"{name}.rbw")
    write_directory(tmp_path / "out", model.config, model.weights(), arch=arch)
    other = loaded(tmp_path / "out")
    assert error(other, model) <= AGREEMENT
    prompt = [5, 17, 3]
    count = min(40, model.config.max_seq_len - len(prompt))
    assert goes_on_alike(other, prompt, model.generate(prompt, count, Sampler.greedy()))
    back = imported(tmp_path / "out")
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for (_, a), (_, b) in zip(back.weights(), model.weights(), strict=True)
    )


@pytest.mark.parametrize("arch", ["ernie4_5_moe", "qwen2_moe"])
def test_transformers_puts_shards_together(tmp_path, arch):
    model = exported(tmp_path / "out", MOE, arch=arch, max_shard_bytes=3_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 5
    assert error(loaded(tmp_path / "out"), model) <= AGREEMENT


@pytest.mark.parametrize("arch", ["ernie4_5_moe", "qwen2_moe"])
def test_what_transformers_saves_again_is_imported(tmp_path, arch):
    model = exported(tmp_path / "ours", MOE, arch=arch)
    loaded(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    back = imported(tmp_path / "theirs")
    assert back.config == model.config
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(back.weights(), model.weights(), strict=True)
    )


SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
}
THEIRS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-scaled": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "ernie": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "ernie-alone": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_end_index": 1},
    ),
    "qwen": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "mlp_only_layers": [1],
        },
    ),
}


@pytest.mark.parametrize(("family", "changes"), THEIRS.values(), ids=THEIRS)
def test_models_that_transformers_made_are_imported(tmp_path, family, changes):
    config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
    other = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith("shared_expert_gate.weight"):
                parameter.zero_()
            elif parameter.dim() > 1 and "moe_statics" not in name:
                parameter.mul_(5)
    other.save_pretrained(tmp_path / "theirs")
    found = imported(tmp_path / "theirs")
    assert error(other, found) <= AGREEMENT


@pytest.mark.parametrize(("name", "arch"), [("dense", "llama"), ("moe", "qwen2_moe")])
def test_a_bf16_directory_loads_as_such(tmp_path, name, arch):
    exported(tmp_path / "out", MODELS[name], arch=arch, dtype="bfloat16")
    other = loaded(tmp_path / "out", "auto")
    assert other.dtype == torch.bfloat16
    # what was rounded on export is imported with the same values
    assert error(other.float(), imported(tmp_path / "out")) <= AGREEMENT


def test_each_part_of_the_layout_matters(tmp_path, monkeypatch):
    """Left out, any of them makes another model, which the comparison sees."""

    def differs(arch):
        model = exported(tmp_path / "out", MOE, arch=arch, force=True)
        return error(loaded(tmp_path / "out"), model) > 100 * AGREEMENT

    assert not differs("ernie4_5_moe")
    with monkeypatch.context() as patch:
        patch.setattr(hf_layout, "interleaved", lambda matrix, head_dim: matrix)
        assert differs("ernie4_5_moe")
    with monkeypatch.context() as patch:
        patch.setattr(hf_export, "to_stored", lambda form, matrix, head_dim: matrix)
        assert differs("qwen2_moe")
    keys = hf_config._qwen2_keys
    with monkeypatch.context() as patch:
        patch.setattr(hf_config, "_qwen2_keys", lambda c: keys(c) | {"norm_topk_prob": False})
        assert differs("qwen2_moe")


@pytest.mark.parametrize("arch", ["llama", "ernie4_5_moe", "qwen2_moe"])
def test_the_tokenizer_beside_it_gives_the_same_ids(tmp_path, arch):
    words = TokenizerFiles(
        small_tokenizer(), "<|endoftext|>", "<|pad|>", chat_template="{{ messages[0].content }}"
    )
    config = DENSE if arch == "llama" else MOE
    config = type(config)(**vars(config) | {"vocab_size": 600})
    exported(tmp_path / "out", config, arch=arch, files=words)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "It was the best of times, it was 1789.\n\n  def f(x):\treturn x"
    assert theirs(text)["input_ids"] == words.tokenizer.encode(text).ids
    assert (theirs.eos_token_id, theirs.pad_token_id) == (words.eos_id, words.pad_id)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [words.eos_id]
