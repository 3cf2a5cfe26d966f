"""The package's own tokenizer: its first ids, its splits, and that it is always the same."""

import pytest
from texts import MIXED, TOPICS, copy_of, small_tokenizer

from fastbrain.errors import EmptyDataset, InvalidConfig, Io, Serde
from fastbrain.tokens import tokenizer as tokenizer_module
from fastbrain.tokens.tokenizer import load_tokenizer, tokenizer_sha256, train_tokenizer


@pytest.fixture
def tokenizer():
    return small_tokenizer()


def test_the_tokenizer_has_its_special_tokens_and_every_byte_first(tokenizer):
    names = [tokenizer.id_to_token(i) for i in range(4)]
    assert names == ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.get_vocab_size() == 600
    assert {len(tokenizer.id_to_token(i)) for i in range(4, 260)} == {1}


def test_any_text_round_trips(tokenizer):
    for text in [MIXED, "a <|endoftext|> b", "\0\x7f \t\n  x", "".join(map(chr, range(1, 0x2FF)))]:
        plain = copy_of(tokenizer)
        plain.encode_special_tokens = True
        assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_words_are_split_as_gpt_2_splits_them(tokenizer):
    split = tokenizer.pre_tokenizer.pre_tokenize_str("I've  got 12 dogs!")
    assert [word for word, _ in split] == [
        "I",
        "'ve",
        "\u0120",
        "\u0120got",
        "\u012012",
        "\u0120dogs",
        "!",
    ]


def test_training_again_gives_the_same_tokenizer(tokenizer):
    again = train_tokenizer(TOPICS[:20], 600)
    assert again.to_str() == tokenizer.to_str()


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    assert train_tokenizer(["a"], 260).get_vocab_size() == 260
    with pytest.raises(InvalidConfig, match=r"vocab_size is 259; .*at least 260"):
        train_tokenizer(["a"], 259)


def test_no_text_trains_no_tokenizer():
    for nothing in ([], [""]):
        with pytest.raises(EmptyDataset):
            train_tokenizer(nothing, 300)


def test_few_texts_train_a_smaller_one():
    assert 260 < train_tokenizer(["abab abab abab"], 5000).get_vocab_size() < 270


def test_a_tokenizer_is_loaded_from_a_file_or_its_directory(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert load_tokenizer(path).to_str() == tokenizer.to_str()


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(Io, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    for content in (b"{}", b"", b"\xff", b'{"version": "1.0", "model": {"type": "Odd"}}'):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(Serde, match=r"tokenizer\.json is not a tokenizer"):
            load_tokenizer(tmp_path)


def test_the_digest_tells_tokenizers_apart_and_not_their_layout(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "pretty.json"), pretty=True)
    loaded = load_tokenizer(tmp_path / "pretty.json")
    loaded.enable_truncation(5)
    assert tokenizer_sha256(loaded) == tokenizer_sha256(tokenizer)
    loaded.add_tokens(["York"])
    assert tokenizer_sha256(loaded) != tokenizer_sha256(tokenizer)


def test_no_more_text_is_read_than_teaches_anything(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TRAINING_CHARACTERS", 10)
    read = []

    def texts():
        for text in ("one two", "three", "four"):
            read.append(text)
            yield text

    train_tokenizer(texts(), 300)
    assert read == ["one two", "three"]
