"""From text to a token file: once, with a record that cannot be fooled."""

import gzip
import json
import os
from hashlib import sha256

import numpy as np
import pytest
from texts import TOPICS, dumped, ids_of, small_tokenizer

from fastbrain.errors import EmptyDataset, InvalidConfig, InvalidDataset, Io, TokenOutOfRange
from fastbrain.tokens import TokenFile
from fastbrain.tokens import prepare as module
from fastbrain.tokens.prepare import prepare, texts, tokenizer_sha256, train_tokenizer
from fastbrain.tokens.sidecar import FileState

TEXTS = ["One.\r\nTwo, d\u00e9j\u00e0 vu.\n", "Three <|endoftext|> four", "\u4e2d\u6587 \U0001f600"]


@pytest.fixture
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "corpus.bin"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(dumped(*TEXTS))
    return path


@pytest.fixture
def passes(monkeypatch):
    """Counts how often text was really turned into tokens."""
    found = []
    real = module._tokenize
    monkeypatch.setattr(module, "_tokenize", lambda *a: found.append(a) or real(*a))
    return found


def read(path):
    return np.fromfile(path, "<u4").tolist()


def test_lines_become_tokens_and_a_record(source, target, tokenizer):
    made = prepare(source, target, tokenizer)
    ids = ids_of(tokenizer, *TEXTS)
    assert read(target) == ids
    assert ids.count(0) == made.documents == len(TEXTS)
    assert made.path == target
    assert made.tokens == len(ids)
    assert made.max_id == max(ids)
    assert made.sha256 == sha256(target.read_bytes()).hexdigest()
    assert made.tokenizer_sha256 == tokenizer_sha256(tokenizer)
    assert made.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert made.skipped == 0
    record = json.loads((target.parent / "corpus.bin.json").read_text())
    for key in ("tokens", "max_id", "sha256", "tokenizer_sha256", "text_bytes"):
        assert record[key] == getattr(made, key)
    assert record["sources"][0]["sha256"] == sha256(source.read_bytes()).hexdigest()


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_text_file_is_one_document(tmp_path, target, tokenizer, mark):
    text = TEXTS[0] + "".join(TOPICS)[:200_000] + TEXTS[2]
    (tmp_path / "a.txt").write_bytes((mark + text).encode())
    made = prepare(tmp_path / "a.txt", target, tokenizer)
    assert read(target) == ids_of(tokenizer, text)
    assert made.text_bytes == len(text.encode())


def test_a_directory_is_read_in_the_order_of_names(tmp_path, target, tokenizer):
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    (folder / "c.txt").write_text("three")
    (folder / "b" / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    (folder / "a.jsonl").write_bytes(dumped("one", "", "more"))
    (folder / "d.txt").write_text(" \n")  # blank: no document
    (folder / "README.md").write_text("ignored")
    (folder / ".hidden.txt").write_text("ignored")
    made = prepare(folder, target, tokenizer)
    assert read(target) == ids_of(tokenizer, "one", "", "more", "two", "three")
    assert made.documents == 5
    assert list(texts(folder)) == ["one", "", "more", "two", "three"]


def test_texts_train_a_tokenizer_and_pass_over_bad_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab ab ab"}\n{"text": 3}\n{"body": "x"}\n')
    assert train_tokenizer(texts(tmp_path / "a.jsonl"), 300).encode("ab").tokens == ["ab"]
    assert list(texts(tmp_path / "a.jsonl", field="body")) == ["x"]


def test_another_field_and_separator(tmp_path, target, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    body = ids_of(tokenizer, "yes")[:-1]
    for separator, end in (("<|im_end|>", [3]), (7, [7]), (None, [])):
        prepare(tmp_path / "a.jsonl", target, tokenizer, "body", separator=separator)
        assert read(target) == body + end


def test_a_tokenizer_may_be_given_by_path(source, target, tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    by_path = prepare(source, target, tmp_path)
    assert by_path == prepare(source, target, tokenizer)


def test_sources_that_cannot_be_used_are_refused(tmp_path, target, tokenizer, source):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(InvalidConfig, match=r"a\.csv; it must be a \.txt"):
        prepare(tmp_path / "a.csv", target, tokenizer)
    with pytest.raises(Io, match="missing"):
        prepare(tmp_path / "missing.txt", target, tokenizer)
    with pytest.raises(EmptyDataset, match=r"no \.txt"):
        prepare(tmp_path / "empty", target, tokenizer)
    with pytest.raises(EmptyDataset, match="blank"):
        prepare(tmp_path / "blank.txt", target, tokenizer)
    with pytest.raises(InvalidConfig, match="tokenizer is needed"):
        prepare(source, target, None)
    with pytest.raises(InvalidConfig, match=r"'</s>'.*no token"):
        prepare(source, target, tokenizer, separator="</s>")
    assert not target.exists()


def test_bad_lines_stop_or_are_left_out(source, target, tokenizer, passes):
    source.write_text('{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(InvalidDataset, match=r"corpus\.jsonl, line 2: .*is a number"):
        prepare(source, target, tokenizer)
    with pytest.warns(UserWarning, match="1 of 2 documents were skipped"):
        made = prepare(source, target, tokenizer, on_error="skip")
    assert (made.documents, made.skipped) == (1, 1)
    # what was made by leaving lines out does not answer a call that may not
    with pytest.raises(InvalidDataset, match="line 2"):
        prepare(source, target, tokenizer)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"one\ntwo\nthree \xff\nfour", r"a\.txt, line 3: it is not UTF-8: there is a byte 0xff"),
        (b"x" * 70_000 + b"\n\n\xc3", r"a\.txt, line 3: it is not UTF-8"),
        ("one".encode("utf-16"), "UTF-16"),
        (gzip.compress(os.urandom(9000).hex().encode())[:4000], "cut short"),
    ],
    ids=["bad byte", "cut character", "UTF-16", "cut archive"],
)
def test_a_bad_text_file_stops_or_is_left_out(tmp_path, target, tokenizer, content, reason):
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(InvalidDataset, match=reason):
        prepare(tmp_path, target, tokenizer)
    with pytest.warns(UserWarning, match="1 of 2 documents"):
        prepare(tmp_path, target, tokenizer, on_error="skip")
    assert read(target) == ids_of(tokenizer, "good")


def test_the_same_request_is_answered_without_work(source, target, tokenizer, passes):
    first = prepare(source, target, tokenizer)
    written = target.stat()
    assert prepare(source, target, tokenizer) == first
    assert len(passes) == 1
    assert target.stat() == written


def settle(*paths):
    """Make files old enough for their times to be trusted."""
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))


def test_old_files_are_not_read_again(source, target, tokenizer, passes, monkeypatch):
    settle(source)
    prepare(source, target, tokenizer)
    settle(target)
    prepare(source, target, tokenizer)  # the record learns of the token file's new time
    monkeypatch.setattr("fastbrain.atomic.sha256_of", None)
    prepare(source, target, tokenizer)
    assert len(passes) == 1


def change_text(source, target, request):
    data = source.read_text()
    source.write_text(data.replace("One", "Won"))  # no other size


def change_text_unseen(source, target, request):
    change_text(source, target, request)
    os.utime(source, ns=(1, 1))


def add_text(source, target, request):
    with source.open("a") as file:
        file.write('{"text": "more"}\n')


def change_tokens(source, target, request):
    data = bytearray(target.read_bytes())
    data[0] ^= 1
    target.write_bytes(data)


def cut_tokens(source, target, request):
    os.truncate(target, 8)


def remove_tokens(source, target, request):
    target.unlink()


def remove_record(source, target, request):
    target.with_name("corpus.bin.json").unlink()


def break_record(source, target, request):
    target.with_name("corpus.bin.json").write_text('{"format": 1, "tokens": 5}')


def other_format(source, target, request):
    record = target.with_name("corpus.bin.json")
    record.write_text(record.read_text().replace('"format": 1', '"format": 2'))


def other_separator(source, target, request):
    request["separator"] = 1


def other_field(source, target, request):
    source.write_text('{"text": "a", "body": "b"}\n')
    request["field"] = "body"


def other_tokenizer(source, target, request):
    request["tokenizer"] = train_tokenizer(["other text"], 300)


def other_name(source, target, request):
    request["source"] = source.rename(source.with_name("renamed.jsonl"))


@pytest.mark.parametrize(
    "change",
    [
        change_text,
        change_text_unseen,
        add_text,
        change_tokens,
        cut_tokens,
        remove_tokens,
        remove_record,
        break_record,
        other_format,
        other_separator,
        other_field,
        other_tokenizer,
        other_name,
    ],
)
def test_any_change_that_matters_makes_the_tokens_again(source, target, tokenizer, passes, change):
    request = {"source": source, "target": target, "tokenizer": tokenizer}
    prepare(**request)
    change(source, target, request)
    again = prepare(**request)
    assert len(passes) == 2
    assert again.sha256 == sha256(target.read_bytes()).hexdigest()
    fresh = target.with_name("fresh.bin")
    assert prepare(**{**request, "target": fresh}).sha256 == again.sha256


def test_another_size_is_enough_to_know_a_change(source, target, tokenizer, monkeypatch):
    state = FileState.of(source, source.name)
    add_text(source, target, {})
    monkeypatch.setattr("fastbrain.atomic.sha256_of", None)
    assert state.again(source) is None


def test_a_touch_makes_nothing_again(source, target, tokenizer, passes):
    settle(source)
    prepare(source, target, tokenizer)
    os.utime(source)
    os.utime(target)
    prepare(source, target, tokenizer)
    assert len(passes) == 1


def test_a_source_that_changes_while_it_is_read_is_refused(source, target, tokenizer, monkeypatch):
    real = module.all_documents

    def touching(*args):
        yield from real(*args)
        with source.open("a") as file:
            file.write('{"text": "late"}\n')

    monkeypatch.setattr(module, "all_documents", touching)
    with pytest.raises(InvalidDataset, match="changed while it was read"):
        prepare(source, target, tokenizer)
    assert not target.exists()


def test_a_token_file_is_used_where_it_lies(tmp_path, target, tokenizer, monkeypatch):
    path = tmp_path / "made.bin"
    TokenFile.write(path, [5, 7, 599])
    made = prepare(path, target, tokenizer)
    assert not target.exists()
    assert (made.path, made.tokens, made.max_id) == (path, 3, 599)
    assert made.sha256 == sha256(path.read_bytes()).hexdigest()
    assert made.tokenizer_sha256 is made.text_bytes is None
    settle(path)
    prepare(path, target, None)
    monkeypatch.setattr("fastbrain.atomic.sha256_of", None)  # known from its record by now
    monkeypatch.setattr(TokenFile, "max_id", None)
    assert prepare(path, target, tokenizer) == made


def test_a_prepared_file_keeps_what_is_known_of_it(source, target, tokenizer):
    made = prepare(source, target, tokenizer)
    assert prepare(target, "unused.bin", tokenizer) == made


def test_tokens_of_another_tokenizer_are_refused_with_both_digests(source, target, tokenizer):
    prepare(source, target, tokenizer)
    other = train_tokenizer(["other text"], 600)
    with pytest.raises(InvalidDataset) as caught:
        prepare(target, target, other)
    for each in (tokenizer, other):
        assert tokenizer_sha256(each) in str(caught.value)


def test_an_id_beyond_the_tokenizer_is_refused(target, tokenizer):
    TokenFile.write(target, [5, 600])
    with pytest.raises(TokenOutOfRange) as caught:
        prepare(target, target, tokenizer)
    assert (caught.value.id, caught.value.vocab) == (600, 600)


def test_an_impostor_is_refused(target, tokenizer):
    target.write_text("just text, nothing else\n" * 10)
    with pytest.raises(InvalidDataset, match="looks like text"):
        prepare(target, target, tokenizer)


def test_a_foreign_file_in_the_place_of_the_record_is_left_alone(target):
    TokenFile.write(target, [5, 7])
    foreign = target.with_name("corpus.bin.json")
    foreign.write_text('{"mine": 1}')
    assert prepare(target, target, None).tokens == 2
    assert foreign.read_text() == '{"mine": 1}'


def test_a_link_to_a_token_file_elsewhere_is_followed(source, target, tokenizer, tmp_path, passes):
    (tmp_path / "big").mkdir()
    target.symlink_to(tmp_path / "big" / "real.bin")
    prepare(source, target, tokenizer)
    assert target.is_symlink()
    assert read(tmp_path / "big" / "real.bin") == ids_of(tokenizer, *TEXTS)
    prepare(source, target, tokenizer)
    assert len(passes) == 1
