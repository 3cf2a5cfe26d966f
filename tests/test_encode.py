"""Documents to ids by a tokenizer: as plain text, in parts, and the tokenizer left as it was."""

import itertools
from functools import partial

import numpy as np
import pytest
from texts import MIXED, TOPICS, a_megabyte, copy_of, dumped, small_tokenizer, tokenize_lines
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from fastbrain.errors import InvalidConfig
from fastbrain.tokens.documents import Document
from fastbrain.tokens.encode import cuts_exactly, encode, parts

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture
def write(tmp_path):
    return partial(tokenize_lines, tmp_path)


@pytest.fixture
def tokenizer():
    return small_tokenizer()


def test_a_tokenizer_gives_what_its_encode_gives(write, tokenizer):
    texts = [MIXED, "", "a", *TOPICS[:5]]
    expected = [i for t in texts for i in [*tokenizer.encode(t, add_special_tokens=False).ids, 0]]
    assert write(dumped(*texts), tokenize=tokenizer) == expected


def test_special_token_text_in_a_document_is_plain_text(write, tokenizer):
    texts = ["a<|endoftext|>b", "<|pad|><|im_start|>user", "<|endoftext|>"]
    before = tokenizer.to_str()
    ids = write(dumped(*texts), tokenize=tokenizer)
    assert ids.count(0) == len(texts)  # the separators, and only they
    assert not {1, 2, 3} & set(ids)
    plain = [tokenizer.decode([i for i in g]) for k, g in itertools.groupby(ids, bool) if k]
    assert plain == texts
    # the caller's tokenizer still reads them as what they are for it
    assert tokenizer.encode("<|endoftext|>").ids == [0]
    assert tokenizer.encode_special_tokens is False
    assert tokenizer.to_str() == before


def test_truncation_padding_and_added_tokens_of_the_tokenizer_do_not_reach_the_file(
    write, tokenizer
):
    configured = copy_of(tokenizer)
    configured.enable_truncation(3)
    configured.enable_padding(length=50, pad_id=1)
    texts = ["one two three four five", "six"]
    assert write(dumped(*texts), tokenize=configured) == write(dumped(*texts), tokenize=tokenizer)
    assert configured.truncation["max_length"] == 3
    assert configured.padding["length"] == 50


def test_a_tokenizer_that_cannot_be_copied_is_refused_with_a_way_out(write):
    class Mine:
        def pre_tokenize(self, text):
            pass

    custom = Tokenizer(models.BPE())
    custom.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Mine())
    with pytest.raises(InvalidConfig, match="lambda text"):
        write(dumped("a"), tokenize=custom)


@pytest.fixture
def corpus():
    return a_megabyte()


def with_split(tokenizer, pattern):
    changed = copy_of(tokenizer)
    changed.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return changed


@pytest.mark.parametrize("splits", ["GPT-2", "GPT-4", "GPT-2 with a space in front"])
def test_a_long_document_is_cut_and_has_the_ids_of_the_whole(tokenizer, corpus, splits):
    if splits == "GPT-4":
        tokenizer = with_split(tokenizer, GPT4)
    elif splits != "GPT-2":
        tokenizer = copy_of(tokenizer)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert cuts_exactly(tokenizer)
    pieces = [corpus[i : i + 5000] for i in range(0, len(corpus), 5000)]
    texts = [text for text, _ in parts([Document("", pieces)], True)]
    assert len(texts) > 150
    assert "".join(texts) == corpus
    ids = np.concatenate(list(encode([Document("", pieces)], tokenizer, None)))
    assert ids.tolist() == tokenizer.encode(corpus, add_special_tokens=False).ids


def test_ids_do_not_depend_on_the_size_of_batches_and_pieces(tokenizer, corpus):
    text = corpus[:100_000]
    expected = [*tokenizer.encode(text).ids, 9, *tokenizer.encode("end").ids, 9]
    for size, batch in itertools.product((777, 65_536), (1, 10_000, 1 << 30)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        documents = [Document("", pieces), Document("", ["end"])]
        ids = np.concatenate(list(encode(documents, tokenizer, 9, batch)))
        assert ids.tolist() == expected


def test_cuts_are_only_before_a_single_space_between_two_letters():
    pieces = ["a b", "  c 1 d. e \u00e9 \u4e2d", "\u6587 f\tg\nh", " i' j 'k \u0661 l m n"]
    texts = [part for part, _ in parts([Document("", pieces)], True)]
    assert texts == ["a b  c 1 d. e", " \u00e9 \u4e2d\u6587", " f\tg\nh", " i' j 'k \u0661 l m n"]


def test_where_a_document_ends_is_kept():
    documents = [Document("", ["a", " b"]), Document("", []), Document("", ["c"])]
    assert list(parts(documents, True)) == [("a", False), (" b", True), ("", True), ("c", True)]
    assert list(parts(documents, False)) == [("a b", True), ("", True), ("c", True)]


def words(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def unsplit(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=False)


def phrases(tokenizer):
    split = pre_tokenizers.Split(Regex(r"\p{L}+ \p{L}+"), "isolated")
    tail = pre_tokenizers.ByteLevel(use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tail])


def strips(tokenizer):
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def dropout(tokenizer):
    tokenizer.model.dropout = 0.5


def new_york(tokenizer):
    tokenizer.add_tokens(["New York"])


def swallows_space(tokenizer):
    tokenizer.add_tokens([AddedToken("York", rstrip=True)])


@pytest.mark.parametrize(
    "change", [words, unsplit, phrases, strips, dropout, new_york, swallows_space]
)
def test_a_tokenizer_whose_words_may_span_a_cut_gets_documents_whole(tokenizer, change):
    changed = copy_of(tokenizer)
    change(changed)
    assert not cuts_exactly(changed)


def test_normal_forms_and_other_added_tokens_may_be_cut(tokenizer):
    changed = copy_of(tokenizer)
    changed.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.NFC()])
    changed.add_tokens(["York", AddedToken("York2", lstrip=True)])
    changed.add_special_tokens([AddedToken("<| end |>", rstrip=True)])  # plain text here
    assert cuts_exactly(changed)
