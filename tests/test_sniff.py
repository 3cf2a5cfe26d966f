"""Files that are no token ids are named, and token ids are not taken for such files."""

import gzip
import os

import numpy as np
import pytest

from fastbrain.errors import InvalidDataset, Io
from fastbrain.tokens import TokenFile

PROSE = "The quick brown fox, who was not in a hurry, went round the lazy dog twice.\n" * 40


@pytest.fixture
def path(tmp_path):
    return tmp_path / "corpus.bin"


def u16(ids):
    return np.asarray(ids, np.uint16).tobytes()


def zipf(count, vocab):
    return np.minimum(np.random.default_rng(0).zipf(1.3, count) - 1, vocab - 1)


IMPOSTORS = {
    "empty": (b"", "is empty"),
    "1 byte": (b"\5", "has 1 of the 4 bytes"),
    "3 bytes": (b"\5\0\0", "has 3 of the 4 bytes"),
    "not 4n": (np.arange(100, dtype="<u4").tobytes()[:-2], "398 bytes, not a multiple"),
    "text": (PROSE.encode(), "looks like text"),
    "short text": (b"hello, world", "looks like text"),
    "text not 4n": (b"hello", "looks like text"),
    "Russian text": (
        "\u043f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440\n".encode() * 300,
        "looks like text",
    ),
    "Latin-1 text": (
        "na\u00efvet\u00e9 in a caf\u00e9, \n".encode("latin-1") * 9,
        "looks like text",
    ),
    "JSONL": (b'{"text": "one"}\n{"text": "two"}\n', "looks like JSON lines"),
    "JSONL with a mark": (b'\xef\xbb\xbf{"text": "one"}\n', "looks like JSON lines"),
    "UTF-16": (PROSE.encode("utf-16"), "looks like UTF-16"),
    "UTF-16 without a mark": (PROSE.encode("utf-16-le"), "looks like UTF-16"),
    "UTF-16, big end first": (PROSE.encode("utf-16-be"), "looks like UTF-16"),
    "big-endian": (np.arange(500, dtype=">u4").tobytes(), "big-endian"),
    "big-endian, large ids": (zipf(4000, 150_000).astype(">u4").tobytes(), "big-endian"),
    "u16 text": (u16(zipf(4000, 50_257)), "16-bit ids"),
    "u16 counting": (u16(range(1000)), "16-bit ids"),
    "u16 even": (u16(np.random.default_rng(0).integers(0, 50_257, 1000)), "16-bit ids"),
    "u16 letters": (u16(np.random.default_rng(0).integers(0, 65, 1000)), "16-bit ids"),
    "int64": (zipf(4000, 50_257).astype("<i8").tobytes(), "64-bit ids"),
    "int64, one more": (zipf(4001, 50_257).astype("<i8").tobytes(), "64-bit ids"),
    "weights": (b"RBWTS001" + os.urandom(4000), "weights of a model"),
    "optimizer state": (b"RBOPT001" + os.urandom(4000), "optimizer state of a model"),
    "gzip": (gzip.compress(os.urandom(4000)), "gzip"),
    "zip": (b"PK\3\4" + os.urandom(4000), "zip archive"),
    "npy": (b"\x93NUMPY\1\0" + os.urandom(4000), r"\.npy"),
}


@pytest.mark.parametrize("content", IMPOSTORS.values(), ids=IMPOSTORS)
def test_what_cannot_be_token_ids_is_refused_by_what_it_is(path, content):
    data, message = content
    path.write_bytes(data)
    with pytest.raises(InvalidDataset, match=message) as caught:
        TokenFile.open(path, 0)
    assert str(path) in str(caught.value)


def test_a_directory_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(InvalidDataset, match="not a plain file"):
        TokenFile.open(tmp_path, 0)
    with pytest.raises(Io, match="none"):
        TokenFile.open(tmp_path / "none.bin", 0)


def far_apart(size, **pokes):
    ids = np.zeros(size, np.uint32)
    for place, value in pokes.items():
        ids[int(place[1:])] = value
    return ids


random = np.random.default_rng(1)
GENUINE = {
    "one id": [2**32 - 1],
    "zeros": np.zeros(5000, int),
    "ones": np.ones(5000, int),
    "counting": np.arange(5000),
    "counting to millions": np.arange(5_000_000),
    "counting above 2**31": np.arange(2**31, 2**31 + 5000),
    "separators between": np.arange(5000) * (np.arange(5000) % 2),
    "documents of one token": np.tile([7, 0, 300, 0, 12, 0, 5, 0], 500),
    "few documents of one token": np.arange(400) // 2 * (np.arange(400) % 2 == 0),
    "letters": random.integers(0, 65, 5000),
    "GPT-2": zipf(5000, 50_257),
    "Llama 3": zipf(5000, 128_256),
    "Gemma, evenly": random.integers(0, 262_144, 5000),
    "a million words": random.integers(0, 1_000_000, 5000),
    "any 31 bits": random.integers(0, 2**31, 5000),
    "any 32 bits": random.integers(0, 2**32, 5000),
    "few of any 32 bits": random.integers(0, 2**32, 20),
    "two small parts": random.integers(0, 16, 5000) + 65_536 * random.integers(0, 16, 5000),
    "small parts above 2**20": random.integers(0, 20, 5000)
    + 65_536 * random.integers(16, 20, 5000),
    "bytes that are UTF-8 but no text": np.full(5000, 0x01020304),
    "multiples of 256": np.arange(5000) * 256,
    "one huge id": far_apart(9000, _4500=2**32 - 256),
    "codes of letters": [ord(c) for c in PROSE],
    "gzip's first bytes as an id": [0x088B1F, *range(1000)],
}


@pytest.mark.parametrize("ids", GENUINE.values(), ids=GENUINE)
def test_ids_are_not_taken_for_something_else(path, ids):
    TokenFile.write(path, ids)
    with TokenFile.open(path, 0) as file:
        assert file.tokens() == len(ids)
        assert file.max_id() == max(ids)
