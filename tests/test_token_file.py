"""Token files: what is written, the crate's windows, spans, and sizes beyond 32 bits."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastbrain.errors import InvalidConfig, InvalidDataset, Io
from fastbrain.tokens import TokenFile

TABLES = Path(__file__).parent / "fixtures" / "tables"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "corpus.bin"


@pytest.fixture
def thousand(path):
    TokenFile.write(path, range(1000))
    return path


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, 2**32 - 1],
        (0, 1, 2**32 - 1),
        np.array([0, 1, 2**32 - 1], np.uint32),
        np.array([0, 1, 2**32 - 1], ">u8"),
        np.array([0, 9, 1, 9, 2**32 - 1, 9])[::2],
        torch.tensor([0, 1, 2**32 - 1]),
        iter([0, 1, 2**32 - 1]),
    ],
    ids=["list", "tuple", "u32", "big-endian", "strided", "tensor", "iterator"],
)
def test_write_takes_any_row_of_integers(path, ids):
    TokenFile.write(path, ids)
    assert path.read_bytes() == b"\0\0\0\0\1\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, -1], "from 0 to 4294967295, but at 1 there is -1"),
        ([5, 2**32], "at 1 there is 4294967296"),
        ([2**80], "position 0 is 1208925819614629174706176"),
        ([5, 1.5], "position 0 is 5.0"),
        (np.array([True]), "position 0 is True"),
        (np.zeros((2, 2), int), "2 dimensions"),
        (["a"], "position 0 is 'a'"),
        (torch.zeros(3), "torch.float32"),
    ],
)
def test_what_is_no_id_is_not_written(path, ids, message):
    TokenFile.write(path, [1, 2])
    with pytest.raises(InvalidDataset, match=message):
        TokenFile.write(path, ids)
    assert path.read_bytes() == b"\1\0\0\0\2\0\0\0"
    assert os.listdir(path.parent) == [path.name]


def test_a_bad_id_far_in_is_named_by_its_place(path):
    ids = np.zeros(3_000_000, np.int64)
    ids[2_500_000] = -7
    with pytest.raises(InvalidDataset, match="at 2500000 there is -7"):
        TokenFile.write(path, ids)
    assert not path.exists()


def test_writing_where_no_directory_is_names_the_path(tmp_path):
    with pytest.raises(Io, match="missing"):
        TokenFile.write(tmp_path / "missing" / "x.bin", [1])


def test_batches_are_those_of_the_crate_for_every_row_of_the_table(path):
    # computed with RustingBrain by Vasyl Trefilov
    table = json.loads((TABLES / "windows.json").read_text())
    files = {}
    for tokens, seed, step, sequences, seq_len, offsets in table["rows"]:
        if (tokens, seed) not in files:
            name = path.with_name(f"{tokens}-{seed}.bin")
            with name.open("wb") as file:
                file.truncate(4 * tokens)
            files[tokens, seed] = TokenFile.open(name, int(seed))
        found = files[tokens, seed].offsets(int(step), sequences, seq_len)
        assert found.tolist() == offsets


def test_a_batch_reads_the_tokens_at_its_offsets(thousand):
    file = TokenFile.open(thousand, 42)
    batch = file.batch(0, 8, 33)
    firsts = [509, 525, 616, 392, 33, 401, 713, 822]
    assert file.offsets(0, 8, 33).tolist() == firsts
    assert batch.ids.tolist() == [list(range(first, first + 33)) for first in firsts]
    assert batch.predicted() == 8 * 32
    assert not batch.is_padded()


def test_a_batch_is_the_same_after_opening_again(thousand):
    before = TokenFile.open(thousand, 7).batch(40_000, 4, 33).ids
    assert torch.equal(TokenFile.open(thousand, 7).batch(40_000, 4, 33).ids, before)


def test_integers_may_be_numpys(thousand):
    plain, wide = TokenFile.open(thousand, 42), TokenFile.open(thousand, np.int64(42))
    for step in (1, 2, 40_000):  # of which the first overflows 63 bits once it is scrambled
        found = wide.offsets(np.int64(step), np.int32(8), np.int64(33))
        assert found.tolist() == plain.offsets(step, 8, 33).tolist()
    span = TokenFile.open(thousand, np.int64(1), span=(np.int32(10), np.int64(500)))
    assert span.chunk(np.int64(1), np.int64(2), np.int64(50)).ids[0, 0] == 110


def test_more_rows_begin_with_the_rows_of_fewer(thousand):
    file = TokenFile.open(thousand, 42)
    assert file.offsets(5, 64, 33)[:8].tolist() == file.offsets(5, 8, 33).tolist()


def test_chunks_cover_the_file_in_order_and_drop_the_tail(thousand):
    file = TokenFile.open(thousand, 0)
    chunks = []
    while (chunk := file.chunk(len(chunks), 4, 33)) is not None:
        chunks.append(chunk)
    assert [chunk.batch() for chunk in chunks] == [4] * 7 + [2]
    read = torch.cat([chunk.ids.flatten() for chunk in chunks])
    assert read.tolist() == list(range(990))
    assert file.chunk(10**15, 4, 33) is None
    assert file.chunk(0, 4, 1001) is None


def test_a_window_may_be_as_long_as_the_file(thousand):
    file = TokenFile.open(thousand, 3)
    assert file.batch(9, 2, 1000).ids.tolist() == [list(range(1000))] * 2


def test_a_window_longer_than_the_file_is_refused(thousand):
    with pytest.raises(InvalidDataset, match=r"1000 tokens .* seq_len 1001"):
        TokenFile.open(thousand, 0).batch(0, 1, 1001)


@pytest.mark.parametrize(
    ("sequences", "seq_len", "message"),
    [(1, 1, "seq_len is 1"), (1, 0, "seq_len is 0"), (0, 8, "sequences is 0"), (0, 1, "seq_len")],
)
def test_batches_of_nothing_are_refused(thousand, sequences, seq_len, message):
    file = TokenFile.open(thousand, 0)
    with pytest.raises(InvalidConfig, match=message):
        file.batch(0, sequences, seq_len)
    with pytest.raises(InvalidConfig, match=message):
        file.chunk(0, sequences, seq_len)


def test_seeds_steps_and_indices_out_of_range_are_refused(thousand):
    with pytest.raises(InvalidConfig, match="seed is -1"):
        TokenFile.open(thousand, -1)
    file = TokenFile.open(thousand, 2**64 - 1)
    file.batch(2**64 - 1, 1, 2)
    for step in (-1, 2**64):
        with pytest.raises(InvalidConfig, match="step is"):
            file.batch(step, 1, 2)
    with pytest.raises(InvalidConfig, match="index is -1"):
        file.chunk(-1, 1, 2)


def test_read_gives_ids_and_stops_at_the_end(thousand):
    file = TokenFile.open(thousand, 0)
    ids = file.read(998, 2)
    assert ids.tolist() == [998, 999]
    assert ids.dtype == np.uint32
    ids += 1  # it is the caller's own
    for offset, count in ((998, 3), (-1, 2), (5, -1)):
        with pytest.raises(InvalidDataset, match="has 1000 to read"):
            file.read(offset, count)


def test_a_span_is_a_file_of_its_own(thousand, path):
    inner = path.with_name("inner.bin")
    TokenFile.write(inner, range(100, 400))
    span, whole = TokenFile.open(thousand, 5, span=(100, 400)), TokenFile.open(inner, 5)
    assert span.tokens() == whole.tokens() == 300
    assert torch.equal(span.batch(3, 16, 50).ids, whole.batch(3, 16, 50).ids)
    assert torch.equal(span.chunk(1, 2, 70).ids, whole.chunk(1, 2, 70).ids)
    assert span.chunk(2, 2, 70) is whole.chunk(3, 2, 70) is None
    assert span.max_id() == 399
    assert span.read(0, 1).tolist() == [100]
    with pytest.raises(InvalidDataset):
        span.read(299, 2)


@pytest.mark.parametrize("span", [(0, 1001), (-1, 5), (5, 5), (6, 5), (1000, 1001)])
def test_a_span_outside_the_file_is_refused(thousand, span):
    with pytest.raises(InvalidConfig, match=r"span is .*1000 tokens"):
        TokenFile.open(thousand, 0, span=span)


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_999])
def test_the_largest_id_is_found_wherever_it_is(path, place):
    ids = np.full(3_000_000, 7, np.uint32)
    ids[place] = 5000
    TokenFile.write(path, ids)
    assert TokenFile.open(path, 0).max_id() == 5000


@pytest.mark.slow
def test_the_scan_takes_a_second_per_gigabyte(path):
    TokenFile.write(path, np.tile(np.arange(50_000, dtype=np.uint32), 5000))
    with TokenFile.open(path, 0) as file:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            assert file.max_id() == 49_999
            times.append(time.perf_counter() - start)
    assert min(times) <= 1.0


TOKENS = 5_000_000_000
POKES = {0: 3, 2**31 - 1: 4, 2**31 + 5: 70_000, 2**32 - 1: 5, 2**32 + 7: 6, TOKENS - 1: 7}


@pytest.fixture
def enormous(path):
    """A sparse file of 20 GB with a few ids in it."""
    with path.open("wb") as file:
        file.truncate(4 * TOKENS)
        for token, value in POKES.items():
            file.seek(4 * token)
            file.write(value.to_bytes(4, "little"))
    yield path
    path.unlink()


def test_ids_beyond_2_to_the_32_tokens_are_where_they_were_put(enormous):
    file = TokenFile.open(enormous, 42)
    assert file.tokens() == TOKENS
    for token, value in POKES.items():
        assert file.read(token, 1).tolist() == [value]
    windows = file.windows(np.array([2**31, 2**32, TOKENS - 10]), 10)
    assert windows.ids[0].tolist() == [0] * 5 + [70_000] + [0] * 4
    assert windows.ids[1].tolist() == [0] * 7 + [6] + [0] * 2
    assert windows.ids[2].tolist() == [0] * 9 + [7]
    assert file.chunk(TOKENS // 1000 - 1, 10, 100).ids[9, 99] == 7
    tail = TokenFile.open(enormous, 0, span=(2**32, TOKENS))
    assert tail.read(7, 1).tolist() == [6]


def test_offsets_into_an_enormous_file_are_uniform(enormous):
    file = TokenFile.open(enormous, 42)
    last = TOKENS - 1024
    drawn = np.concatenate([file.offsets(step, 1000, 1024) for step in range(1000)])
    assert 0 <= drawn.min() < drawn.max() <= last
    seen, _ = np.histogram(drawn, bins=100, range=(0, last + 1))
    chi_square = float(((seen - 10_000) ** 2 / 10_000).sum())
    assert chi_square < 148.2  # p > 0.001 at 99 degrees of freedom


def batches_grow_by(file, count):
    for step in range(500):
        file.batch(step, 8, 1024)
    before = resident_bytes()
    for step in range(count):
        file.batch(step, 8, 1024)
    return resident_bytes() - before


def test_reading_an_enormous_file_takes_no_memory(enormous):
    file = TokenFile.open(enormous, 42)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert batches_grow_by(file, 1000) <= 1 << 20
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


@pytest.mark.slow
def test_twenty_thousand_batches_grow_by_less_than_two_megabytes(enormous):
    assert batches_grow_by(TokenFile.open(enormous, 42), 20_000) <= 2 << 20


def test_threads_may_read_at_once(path):
    TokenFile.write(path, np.arange(200_000))
    file = TokenFile.open(path, 1)
    expected = [file.batch(step, 4, 256).ids for step in range(40)]
    found = {}

    def read(first):
        for step in range(first, 40, 4):
            found[step] = file.batch(step, 4, 256).ids

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[step], expected[step]) for step in range(40))


def test_a_copy_of_a_file_gives_the_same_batches(thousand, tmp_path):
    other = tmp_path / "other.bin"
    shutil.copy(thousand, other)
    a, b = TokenFile.open(thousand, 9), TokenFile.open(other, 9)
    assert torch.equal(a.batch(2, 3, 20).ids, b.batch(2, 3, 20).ids)
