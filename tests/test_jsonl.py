"""JSON lines to tokens: every kind of good and bad line, long ones and many."""

import json
import os
import re
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from texts import MIXED, a_megabyte, codes, dumped, small_tokenizer, tokenize_lines

from fastbrain.errors import InvalidConfig, InvalidDataset, Io
from fastbrain.tokens import TokenFile
from fastbrain.tokens.jsonl import write_jsonl


@pytest.fixture
def write(tmp_path):
    return partial(tokenize_lines, tmp_path)


@pytest.fixture
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def corpus():
    return a_megabyte()


GOOD = {
    "plain": (b'{"text": "ab"}\n{"text": "c"}\n', ["ab", "c"]),
    "no last newline": (b'{"text": "ab"}\n{"text": "c"}', ["ab", "c"]),
    "byte order mark": (b'\xef\xbb\xbf{"text": "ab"}\n', ["ab"]),
    "CRLF": (b'{"text": "ab"}\r\n{"text": "c"}\r\n', ["ab", "c"]),
    "blank lines": (
        b'\n  \t\n{"text": "ab"}\n\r\n\xc2\xa0\xe3\x80\x80\n{"text": "c"}\n\n',
        ["ab", "c"],
    ),
    "no text": (b'{"text": ""}\n{"text": "c"}\n', ["", "c"]),
    "nothing": (b"", []),
    "newlines inside": (b'{"text": "a\\nb\\r\\nc"}\n', ["a\nb\r\nc"]),
    "other separators of lines": (
        '{"text": "a\u2028b\u2029c\x85d"}\n{"text": "e"}\n'.encode(),
        ["a\u2028b\u2029c\x85d", "e"],
    ),
    "escaped NUL": (b'{"text": "a\\u0000b"}\n', ["a\0b"]),
    "pair of surrogates": (b'{"text": "\\ud83d\\ude00"}\n', ["\U0001f600"]),
    "other fields": (b'{"meta": {"text": 5}, "text": "ab", "score": 1e400}\n', ["ab"]),
    "field twice": (b'{"text": "old", "text": "ab"}\n', ["ab"]),
}


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD)
def test_good_lines_become_their_texts(write, case):
    data, texts = case
    assert write(data) == codes(*texts)


def test_no_separator_runs_documents_together(write):
    assert write(dumped("ab", "c"), separator=None) == [97, 98, 99]


def test_the_token_file_has_it_as_a_method(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(dumped("ab"))
    arguments = (tmp_path / "out.bin", tmp_path / "in.jsonl", "text", 7, lambda text: [1, 2])
    assert TokenFile.write_jsonl(*arguments) == 3
    assert TokenFile.open(tmp_path / "out.bin", 0).read(0, 3).tolist() == [1, 2, 7]


BAD = {
    "missing field": (b'{"txt": "a", "id": 3}', r"no field 'text'; it has 'txt', 'id'"),
    "no fields": (b"{}", "no field 'text'; it has no fields at all"),
    "null": (b'{"text": null}', "'text' is null, not a string"),
    "number": (b'{"text": 5}', "'text' is a number"),
    "boolean": (b'{"text": true}', "'text' is a boolean"),
    "list": (b'{"text": ["a"]}', "'text' is a list"),
    "object": (b'{"text": {"en": "a"}}', "'text' is an object"),
    "list of lines": (b'[{"text": "a"}]', "it is a list, not an object with a field 'text'"),
    "a string": (b'"text"', "it is a string, not an object"),
    "no JSON": (b"text: a", r"not JSON: expecting value, near 'text: a"),
    "cut": (b'{"text": "a', "not JSON: unterminated string"),
    "two objects": (b'{"text": "a"}{"text": "b"}', "not JSON: extra data"),
    "raw control character": (b'{"text": "a\tb"}', "not JSON: invalid control character"),
    "raw NUL": (b'{"text": "a\0b"}', "NUL bytes"),
    "only NULs": (b"\0" * 100, "NUL bytes"),
    "half a pair": (b'{"text": "a\\ud83d b"}', "half of a surrogate pair"),
    "bad UTF-8": (b'{"text": "caf\xe9"}', r"not UTF-8: there is a byte 0xe9 after .*caf"),
    "NaN": (b'{"text": "a", "score": NaN}', "NaN is no JSON number"),
    "nested": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "long number": (b'{"n": ' + b"1" * 5000 + b', "text": "a"}', "digits"),
    "second byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "not JSON"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_line_fails_by_its_number_and_reason(write, tmp_path, case):
    line, reason = case
    (tmp_path / "out.bin").write_bytes(b"old!")
    with pytest.raises(InvalidDataset, match=rf"in\.jsonl, line 3: .*{reason}"):
        write(dumped("ab") + b"\n" + line + b"\n" + dumped("c"))
    assert (tmp_path / "out.bin").read_bytes() == b"old!"
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.bin"]


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_line_is_left_out_on_request(write, case):
    line, reason = case
    skipped = []
    data = dumped("ab") + line + b"\n" + dumped("c")
    ids = write(data, on_error="skip", on_skip=lambda *bad: skipped.append(bad))
    assert ids == codes("ab", "c")
    ((number, why),) = skipped
    assert number == 2
    assert re.search(reason, why)


def test_skipping_warns_once_with_the_count_and_the_first(write):
    data = dumped("a") + b"x\n" + dumped("b") + b"{}\n"
    with pytest.warns(
        UserWarning, match=r"^2 of 4 documents were skipped; .*line 2: .*JSON"
    ) as all:
        assert write(data, on_error="skip") == codes("a", "b")
    assert len(all) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(dumped("a"), on_error="skip")


def test_utf_16_is_named(write):
    with pytest.raises(InvalidDataset, match="line 1: the file is UTF-16"):
        write(dumped("ab").decode().encode("utf-16"))


def test_arguments_that_cannot_be_met_are_refused(write, tmp_path):
    with pytest.raises(InvalidConfig, match="on_error is 'ignore'"):
        write(b"", on_error="ignore")
    for separator in (-1, 2**32):
        with pytest.raises(InvalidConfig, match="separator is"):
            write(b"", separator=separator)
    with pytest.raises(Io, match=r"none\.jsonl"):
        write_jsonl(tmp_path / "out.bin", tmp_path / "none.jsonl", "text", 0, list)
    with pytest.raises(InvalidConfig, match="overwritten by its own tokens"):
        write_jsonl(tmp_path / "in.jsonl", tmp_path / "in.jsonl", "text", 0, list)


@pytest.mark.parametrize(
    ("ids", "reason"), [([1, -1], "at 1 there is -1"), ([0.5], "is 0.5"), ([2**32], "4294967296")]
)
def test_bad_ids_from_a_function_name_the_line(write, ids, reason):
    with pytest.raises(InvalidDataset, match=rf"line 2: the ids that tokenize returned.*{reason}"):
        write(dumped("fine", "bad"), tokenize=lambda text: ids if text == "bad" else [1])


def test_an_error_of_the_function_comes_through_and_leaves_nothing(write, tmp_path):
    def tokenize(text):
        raise KeyError(text)

    with pytest.raises(KeyError, match="ab"):
        write(dumped("ab"), tokenize=tokenize)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_line_has_the_ids_of_its_text(write, tokenizer, corpus, ascii_only):
    text = corpus + 'quotes " and \\ backslashes \\" \\\\'
    line = dumped(text, "b", ensure_ascii=ascii_only)
    expected = [*tokenizer.encode(text).ids, 0, *tokenizer.encode("b").ids, 0]
    assert write(line, tokenize=tokenizer) == expected


def test_a_long_line_is_decoded_like_a_short_one(write):
    other = 'x"\\' * 100_000
    row = {"a": other, other: 1, "list": [other, {"text": other}], "text": "short", "z": other}
    assert write(json.dumps(row).encode()) == codes("short")
    row["text"] = MIXED * 20_000
    assert write(json.dumps(row).encode()) == codes(row["text"])


LONG_BAD = {
    "half a pair": (b'", "text": "' + b"a b " * 400_000 + b'\\udc00"}', "surrogate"),
    "bad UTF-8": (b'", "text": "' + b"a b " * 400_000 + b'\xff"}', "byte 0xff after .*a b"),
    "bad escape": (b'", "text": "' + b"a b " * 400_000 + b'\\x"}', "invalid .escape"),
    "control character": (
        b'", "text": "' + b"a b\n".replace(b"\n", b"\1") * 400_000 + b'"}',
        "control",
    ),
    "no end": (b'", "text": "' + b"a b " * 400_000, "does not end"),
    "escaped end": (b'", "text": "' + b"a b " * 400_000 + b'\\\\\\"}', "does not end"),
    "cut behind": (b'", "text": "' + b"a b " * 400_000 + b'", "b"', "not JSON"),
    "not a string": (b'", "text": [' + b'"a", ' * 400_000 + b'"a"]}', "is a list"),
    "missing": (b'", "txt": "' + b"a b " * 400_000 + b'"}', "no field 'text'; it has 'id', 'txt'"),
}


@pytest.mark.parametrize("case", LONG_BAD.values(), ids=LONG_BAD)
def test_a_bad_long_line_fails_by_its_number_and_reason(write, case):
    rest, reason = case
    with pytest.raises(InvalidDataset, match=rf"line 2: .*{reason}"):
        write(dumped("ab") + b'{"id": "7' + rest + b"\n")


MEASURE = """
import sys
from fastbrain.tokens import TokenFile
from fastbrain.tokens.tokenizer import load_tokenizer
source, tokenizer, target = sys.argv[1:]
def peak():
    # not ru_maxrss, which begins with the memory of the process that started this one
    return next(line.split()[1] for line in open("/proc/self/status") if "VmHWM" in line)
before = peak()
count = TokenFile.write_jsonl(target, source, "text", 0, load_tokenizer(tokenizer))
print(before, peak(), count)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_a_line_of_100_megabytes_stays_below_600_megabytes_of_memory(
    tmp_path, tokenizer, corpus, wide
):
    unit = corpus if wide else corpus.encode("ascii", "ignore").decode()
    text = unit * (100_000_000 // len(unit.encode()) + 1)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.bin"
    source.write_bytes(dumped(text, ensure_ascii=False))
    assert source.stat().st_size > 100_000_000
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", MEASURE, source, tmp_path / "tokenizer.json", target]
    before, peak, count = map(int, subprocess.check_output(command).split())
    print(f"{before // 1024} MB before, {peak // 1024} MB at most, {count} tokens")
    assert peak // 1024 < 600
    # the unit ends in white space, so that its repetitions are the whole's beginning
    ids = np.fromfile(target, "<u4")
    first = tokenizer.encode(unit[: len(unit) // 2].rpartition(" ")[0]).ids[:-1]
    assert ids[: len(first)].tolist() == first
    assert tokenizer.decode(ids[-50_000:-1].tolist())[100:] in text[-500_000:]


@pytest.mark.slow
def test_a_million_lines(write, tokenizer):
    texts = [f"line {i} of many" for i in range(1000)]
    expected = [i for t in texts for i in [*tokenizer.encode(t).ids, 0]]
    assert write(dumped(*texts) * 1000, tokenize=tokenizer) == expected * 1000
