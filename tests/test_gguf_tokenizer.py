"""A tokenizer goes into a GGUF file and comes back with the same ids, or is refused by name."""

import json
from functools import cache

import pytest
from gguf_files import file, tensors, values
from texts import MIXED, TOPICS, copy_of, small_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from fastbrain.errors import FastBrainError, InvalidConfig, InvalidSnapshot, Serde
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.formats.gguf_splits import SPLITS
from fastbrain.formats.gguf_tokenizer import read_tokenizer, tokenizer_keys
from fastbrain.tokens.tokenizer import tokenizer_sha256
from fastbrain.tokens.tokenizer_files import TokenizerFiles

pytest.importorskip("gguf")

SAMPLES = [*dict.fromkeys(text[at : at + 300] for at in range(0, 2_000, 400) for text in TOPICS)]
SAMPLES = SAMPLES[:196]
SAMPLES += [MIXED, "1234567 89.5 can't CAN'T x=10**3;\r\n\r\n\t  y", "  e\u0301 \u00e9 \u00bd", "a"]
TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def files(tokenizer=None, **changes):
    given = {"eos": "<|endoftext|>", "pad": "<|pad|>"} | changes
    return TokenizerFiles(tokenizer or small_tokenizer(), **given)


def back(made, vocab_size=600):
    found = read_tokenizer(tokenizer_keys(made, vocab_size), vocab_size)
    assert found is not None
    return found


def ids(tokenizer):
    return [each.ids for each in tokenizer.encode_batch(SAMPLES)]


@cache
def splitting(name):
    """A tokenizer that splits text as a file says by this name."""
    split = SPLITS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=split.whole_words))
    split.apply(tokenizer)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TOPICS[:12], MIXED], trainer)
    return tokenizer


def test_there_are_two_hundred_samples():
    assert len(set(SAMPLES)) == 200


def test_our_own_tokenizer_comes_back_as_it_was():
    found = back(files())
    assert tokenizer_sha256(found.tokenizer) == tokenizer_sha256(small_tokenizer())
    assert ids(found.tokenizer) == ids(small_tokenizer())
    assert (found.eos, found.pad, found.bos) == ("<|endoftext|>", "<|pad|>", None)


def test_what_is_said_beside_the_tokenizer_comes_back():
    given = files(bos="<|im_start|>", chat_template=TEMPLATE, ends=(3,))
    found = back(given)
    assert found.bos == "<|im_start|>"
    assert found.chat_template == TEMPLATE
    assert found.ends == given.ends == (0, 3)


@pytest.mark.parametrize("name", SPLITS)
def test_every_way_of_splitting_comes_back(name):
    tokenizer = splitting(name)
    keys = tokenizer_keys(files(tokenizer), 900)
    assert keys["tokenizer.ggml.pre"] == name
    # without a word on it, a file of Llama 3's kind begins every text with a token
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert ids(back(files(tokenizer), 900).tokenizer) == ids(tokenizer)


def test_ways_of_splitting_are_told_apart_by_their_ids():
    tokenizer = splitting("gpt-2")
    keys = tokenizer_keys(files(tokenizer), 900)
    for name in ("smollm", "llama-bpe", "qwen2", "default"):
        other = read_tokenizer(keys | {"tokenizer.ggml.pre": name}, 900)
        assert ids(other.tokenizer) != ids(tokenizer), name


def test_other_names_of_a_split_mean_the_same():
    keys = tokenizer_keys(files(splitting("llama-bpe")), 900)
    for name in ("llama3", "llama-v3"):
        other = read_tokenizer(keys | {"tokenizer.ggml.pre": name}, 900)
        assert ids(other.tokenizer) == ids(splitting("llama-bpe"))


def test_a_file_of_llama_3_begins_every_text_with_a_token():
    keys = tokenizer_keys(files(splitting("llama-bpe"), bos="<|pad|>"), 900)
    del keys["tokenizer.ggml.add_bos_token"]
    found = read_tokenizer(keys, 900).tokenizer
    assert found.encode("a b").ids == [1, *splitting("llama-bpe").encode("a b").ids]
    assert found.encode("a b", add_special_tokens=False).ids[0] != 1
    again = tokenizer_keys(files(found, bos="<|pad|>"), 900)
    assert again["tokenizer.ggml.add_bos_token"] is True


def test_the_keys_are_those_that_llama_cpp_wants():
    tokenizer = copy_of(small_tokenizer())
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    keys = tokenizer_keys(files(tokenizer, ends=(3,), chat_template=TEMPLATE), 604)
    tokens, types = keys.pop("tokenizer.ggml.tokens"), keys.pop("tokenizer.ggml.token_type")
    assert tokens[:4] == ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    assert tokens[600:] == ["<think>", "[PAD601]", "[PAD602]", "[PAD603]"]
    assert types == [3] * 4 + [1] * 596 + [4] + [5] * 3
    merges = keys.pop("tokenizer.ggml.merges")
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    assert merges == [f"{left} {right}" for left, right in pairs]
    assert keys == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    found = read_tokenizer({**keys, **rest(tokens, types, merges)}, 604)
    assert found.size == 601
    assert found.tokenizer.encode("a<think>").ids[-1] == 600
    assert found.tokenizer.decode([600, 3]) == "<think>"


def rest(tokens, types, merges):
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def test_a_model_without_tokenizer_says_so():
    assert tokenizer_keys(None, 600) == {"tokenizer.ggml.model": "none"}
    assert read_tokenizer({"tokenizer.ggml.model": "none"}, 600) is None
    assert read_tokenizer({}, 600) is None


def changed(change):
    tokenizer = copy_of(small_tokenizer())
    change(tokenizer)
    return tokenizer


def with_model(**keys):
    spec = json.loads(small_tokenizer().to_str())
    spec["model"] |= keys
    return Tokenizer.from_str(json.dumps(spec))


def splitting_by(step):
    def change(tokenizer):
        tokenizer.pre_tokenizer = step

    return changed(change)


def lowered(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def ended(tokenizer):
    tokenizer.post_processor = TemplateProcessing(single="$A <e>", special_tokens=[("<e>", 3)])


OTHERS = {
    "spaces": (
        lambda: splitting_by(pre_tokenizers.Whitespace()), "splits text by .*'Whitespace'.*gpt-2",
    ),
    "a space before": (
        lambda: splitting_by(pre_tokenizers.ByteLevel(add_prefix_space=True)), "settings",
    ),
    "another regex": (
        lambda: splitting_by(pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated")), "'Split'",
    ),
    "no split": (lambda: splitting_by(pre_tokenizers.Sequence([])), "splits text by"),
    "lower case": (lambda: changed(lowered), "'Lowercase'"),
    "whole words": (lambda: with_model(ignore_merges=True), "splits text by"),
    "dropout": (lambda: with_model(dropout=0.1), "dropout"),
    "a suffix": (lambda: with_model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    "bytes": (lambda: with_model(byte_fallback=True), "byte_fallback"),
    "no merges": (lambda: with_model(merges=[]), "no merges"),
    "an end": (lambda: changed(ended), r"adds the ids \[3\]"),
    "spaces around": (
        lambda: changed(lambda t: t.add_special_tokens([AddedToken("<m>", lstrip=True)])),
        "'<m>' takes the space",
    ),
    "a token for unused": (
        lambda: changed(lambda t: t.add_tokens(["[PAD605]"])), r"stands for an unused id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_tokenizer_that_a_file_cannot_describe_is_refused(kind):
    make, words = OTHERS[kind]
    with pytest.raises(InvalidConfig, match=words):
        tokenizer_keys(files(make()), 610)


def test_a_word_piece_tokenizer_is_refused():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(InvalidConfig, match="is a WordPiece model"):
        tokenizer_keys(TokenizerFiles(tokenizer, "a", "a"), 610)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with pytest.raises(InvalidConfig, match=r"has 600 ids, more than .* 599"):
        tokenizer_keys(files(), 599)


SPOILED = {
    "sentencepiece": ({"model": "llama"}, InvalidConfig, "tokenizer.ggml.model is 'llama'"),
    "another split": ({"pre": "tekken"}, InvalidConfig, "'tekken'.* it has gpt-2, smollm"),
    "no split": ({"pre": None}, InvalidConfig, "tokenizer.ggml.pre is None"),
    "a list as a split": ({"pre": ["gpt-2"]}, InvalidConfig, "tokenizer.ggml.pre is"),
    "no tokens": ({"tokens": None}, Serde, "tokens must be a list of str"),
    "numbers as tokens": ({"tokens": [1] * 600}, Serde, "tokens must be a list of str"),
    "few types": ({"token_type": [1] * 599}, InvalidSnapshot, "599 token types"),
    "a strange type": ({"token_type": [1] * 599 + [6]}, Serde, "of type 6"),
    "a token twice": ({"tokens": ["a"] * 600}, InvalidSnapshot, "twice"),
    "a merge of nothing": ({"merges": ["a"]}, InvalidSnapshot, "the merge 'a'"),
    "a merge of strangers": ({"merges": ["\u4e2d \u6587"]}, InvalidSnapshot, "the merge"),
    "no merges": ({"merges": None}, Serde, "merges must be a list"),
    "an id too large": ({"eos_token_id": 600}, InvalidSnapshot, "eos_token_id is 600"),
    "no end": ({"eos_token_id": None}, InvalidConfig, "nothing would end a text"),
    "no begin": ({"add_bos_token": True, "bos_token_id": None}, InvalidConfig, "begin with"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_lists_that_make_no_tokenizer_are_refused(tmp_path, kind):
    change, error, words = SPOILED[kind]
    keys = tokenizer_keys(files(), 600) | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    wide = tensors(
        token_embd__weight=(0, (600, 32), bytes(4 * 600 * 32)),
        output__weight=(0, (600, 32), bytes(4 * 600 * 32)),
    )
    path = file(tmp_path, values(**keys), wide)
    with pytest.raises(error, match=words) as caught:
        GgufModel.open(path).tokenizer_files()
    assert isinstance(caught.value, FastBrainError)
    assert str(path) in str(caught.value)


def test_a_file_with_more_tokens_than_rows_is_refused(tmp_path):
    path = file(tmp_path, values(**tokenizer_keys(files(), 600)), tensors())
    with pytest.raises(InvalidSnapshot, match=r"600 tokens.*40 rows"):
        GgufModel.open(path).tokenizer_files()
