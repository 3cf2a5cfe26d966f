"""Whatever a GGUF file says, it is opened or refused in a moment, in little memory, by name."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_files import F32, Q8_0, file, packed, read, tensors, text, values
from texts import small_tokenizer

from fastbrain.errors import FastBrainError, InvalidSnapshot, Io, Serde
from fastbrain.formats.gguf_header import MAX_ITEMS
from fastbrain.formats.gguf_read import GgufModel
from fastbrain.formats.gguf_tokenizer import tokenizer_keys
from fastbrain.tokens.tokenizer_files import TokenizerFiles

pytest.importorskip("gguf")

MOST_SECONDS = 1.0
MOST_BYTES = 50e6


@pytest.fixture(scope="module")
def whole() -> tuple[bytes, int]:
    """A file with a tokenizer, and where the first tensor's bytes begin."""
    files = TokenizerFiles(small_tokenizer(), "<|endoftext|>", "<|pad|>")
    keys = values(**tokenizer_keys(files, 600))
    made = tensors(token_embd__weight=(F32, (600, 32), bytes(4 * 600 * 32)))
    data = packed(keys, made)
    return data, data.index(bytes(4 * 600 * 32))


def looked_at(path: Path) -> None:
    """Open a file and read all of it; only our own errors may come of it, and soon."""
    start = time.process_time()
    told = ""
    try:
        GgufModel.open(path).tokenizer_files()
        read(path)
    except FastBrainError as error:
        told = str(error)
    assert "\n" not in told
    assert len(told) < 2_000
    assert time.process_time() - start < MOST_SECONDS


def test_a_file_cut_anywhere_in_its_header_is_refused(tmp_path, whole):
    data, header = whole
    path = tmp_path / "cut.gguf"
    draw = random.Random(0)
    for size in [*range(40), *draw.sample(range(40, header), 100)]:
        path.write_bytes(data[:size])
        with pytest.raises(Io, match="is cut short"):
            GgufModel.open(path)


def test_a_file_cut_in_its_tensors_is_refused(tmp_path, whole):
    data, header = whole
    path = tmp_path / "cut.gguf"
    for size in random.Random(0).sample(range(header, len(data)), 20):
        path.write_bytes(data[:size])
        with pytest.raises(Io, match=r"tensor .* ends at"):
            GgufModel.open(path)


def test_flipped_bytes_bring_no_other_error(tmp_path, whole):
    flip(tmp_path, *whole, count=150)


@pytest.mark.slow
def test_many_flipped_bytes_bring_no_other_error(tmp_path, whole):
    flip(tmp_path, *whole, count=10_000)


def flip(folder, data, header, count):
    path = folder / "flipped.gguf"
    draw = random.Random(count)
    # what comes before and after the tokenizer's lists is where numbers are
    lists = range(data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.bos"))
    places = [at for at in range(header) if at not in lists or draw.random() < 0.02]
    for _ in range(count):
        changed = bytearray(data)
        changed[draw.choice(places)] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        path.write_bytes(changed)
        looked_at(path)


def counts(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def key(kind: int, rest: bytes, name: str = "a") -> bytes:
    return counts(0, 1, text(name) + struct.pack("<I", kind) + rest)


def info(rank: int, sizes: list[int], kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    rest = struct.pack(f"<I{len(sizes)}QIQ", rank, *sizes, kind, offset)
    return text(name) + rest


HUGE = 2**63
HEADERS: dict[str, tuple[bytes, type[FastBrainError], str]] = {
    "empty": (b"", Io, "cut short"),
    "another kind": (b"PK\3\4" + bytes(100), InvalidSnapshot, "begins with"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), InvalidSnapshot, "version 1;"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), InvalidSnapshot, "big-endian"),
    "tensors": (counts(HUGE, 0), InvalidSnapshot, f"{HUGE} tensors"),
    "keys": (counts(0, HUGE), InvalidSnapshot, f"{HUGE} keys"),
    "a long name": (counts(0, 1, struct.pack("<Q", HUGE)), Io, "cut short"),
    "a long text": (key(8, struct.pack("<Q", HUGE)), Io, "cut short"),
    "not UTF-8": (key(8, struct.pack("<Q", 2) + b"\xff\xfe"), Serde, "not UTF-8"),
    "a long list": (key(9, struct.pack("<IQ", 4, HUGE)), InvalidSnapshot, f"{HUGE} values"),
    "a cut list": (key(9, struct.pack("<IQ", 4, MAX_ITEMS)), Io, "cut short"),
    "a list of lists": (key(9, struct.pack("<IQ", 9, 1)), Serde, "unknown type 9"),
    "an unknown value": (key(13, b""), Serde, "unknown type 13"),
    "a key twice": (
        counts(0, 2, (text("a") + struct.pack("<IB", 0, 1)) * 2), InvalidSnapshot, "twice",
    ),
    "a tensor twice": (counts(2, 0, info(1, [8]) * 2), InvalidSnapshot, "twice"),
    "no dimensions": (counts(1, 0, info(0, [])), InvalidSnapshot, "0 dimensions"),
    "dimensions": (counts(1, 0, info(2**32 - 1, [])), InvalidSnapshot, "dimensions"),
    "an empty tensor": (counts(1, 0, info(2, [4, 0])), InvalidSnapshot, "not made of blocks"),
    "part of a block": (counts(1, 0, info(1, [33], Q8_0)), InvalidSnapshot, "blocks of Q8_0"),
    "overflow": (counts(1, 0, info(4, [2**62] * 4)), Io, "ends at"),
    "an offset": (counts(1, 0, info(1, [1], 0, 2**64 - 32)), Io, "ends at"),
    "not aligned": (counts(1, 0, info(1, [1], 0, 4)), InvalidSnapshot, "not aligned"),
    "overlap": (
        counts(2, 0, info(1, [16]) + info(1, [1], 0, 32, "u")) + bytes(96),
        InvalidSnapshot,
        "starts inside",
    ),
    "alignment": (
        key(4, struct.pack("<I", 24), "general.alignment"), InvalidSnapshot, "a power of two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_hostile_headers(tmp_path, kind):
    data, error, words = HEADERS[kind]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=words):
        measured(path)


def test_a_header_without_end_is_refused(tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(key(8, struct.pack("<Q", 200_000_000)))
    # a file of this size that takes no place on the disk
    os.truncate(path, 300_000_000)
    with pytest.raises(InvalidSnapshot, match="header of more than"):
        measured(path)


SIZES = [0, 1, 3, 511, 2**16, 2**31 - 1, 2**32 - 1]


@pytest.mark.parametrize("name", [each for each, value in values().items() if type(value) is int])
def test_sizes_that_no_tensor_has_are_refused(tmp_path, name):
    for size in SIZES:
        if size != values()[name]:
            path = file(tmp_path, values(**{name: size}), tensors())
            if name != "llama.context_length" or not 0 < size < 2**20:
                with pytest.raises(FastBrainError):
                    measured(path)


def test_experts_of_more_layers_than_the_file_has_are_not_listed(tmp_path):
    keys = {name.replace("llama", "ernie4_5-moe"): each for name, each in values().items()}
    keys |= {
        "general.architecture": "ernie4_5-moe",
        "ernie4_5-moe.block_count": 511,
        "ernie4_5-moe.expert_count": 512,
        "ernie4_5-moe.expert_used_count": 1,
        "ernie4_5-moe.expert_feed_forward_length": 64,
    }
    with pytest.raises(InvalidSnapshot, match="tensors are too few for that"):
        measured(file(tmp_path, keys, tensors()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, True, "1", [1]])
@pytest.mark.parametrize("name", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_numbers_that_make_no_model_are_refused(tmp_path, name, value):
    with pytest.raises(FastBrainError):
        measured(file(tmp_path, values(**{f"llama.{name}": value}), tensors()))


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": 1e999}', "[" * 100_000])
def test_a_spoiled_record_of_our_own_is_refused(tmp_path, text):
    with pytest.raises(Serde):
        measured(file(tmp_path, values(**{"fastbrain.config": text}), tensors()))


def measured(path: Path) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        GgufModel.open(path)
    finally:
        seconds, most = time.process_time() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < MOST_SECONDS
        assert most < MOST_BYTES
