"""Packed rows on the disk: which a step reads, what comes out of them, and what is refused."""

import os
import time

import numpy as np
import pytest
import torch

from fastbrain.errors import InvalidConfig, InvalidDataset, Io
from fastbrain.stdrng import StdRng
from fastbrain.tokens import packed_file
from fastbrain.tokens.packed_file import (
    ID_END,
    PADDING,
    PackedFile,
    document_words,
    permutation,
    row_words,
)

SEQ_LEN = 8
T, F = True, False
# as large as ids come: it is no padding, also where it begins a document as a target
LARGE = ID_END - 1
ROWS = [
    [([5, 6, 7], [F, T, T]), ([8, 9], [F, T])],
    [([1, 2, 3, 4, 5, 6, 7, 8], [F] * 4 + [T] * 4)],
    [([LARGE, 0, LARGE], [T, T, T])],
    [([11, 12], [F, T]), ([13, 14, 15], [F, F, T]), ([16, 17, 18], [F, T, F])],
    [([21, 22], [F, T])] * 4,
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "packed.bin"
    rows = [row_words([document_words(*doc) for doc in row], SEQ_LEN) for row in ROWS]
    path.write_bytes(np.stack(rows).astype("<u4").tobytes())
    return path


@pytest.fixture
def opened(path):
    with PackedFile.open(path, SEQ_LEN, 42) as opened:
        yield opened


def draws_one_by_one(n, seed):
    """Fisher-Yates from the top, each draw from 0..=i."""
    rng, order = StdRng(seed), list(range(n))
    for i in range(n - 1, 0, -1):
        j = int(rng.integers(1, i)[0])
        order[i], order[j] = order[j], order[i]
    return order


@pytest.mark.parametrize("n", [1, 2, 3, 10, 257, 700])
def test_an_order_is_fisher_yates_from_the_top(n):
    for seed in (0, 7, (1 << 64) - 1):
        assert permutation(n, seed).tolist() == draws_one_by_one(n, seed)


def test_an_order_goes_on_when_the_first_numbers_are_used_up():
    # more draws than are taken from the generator at once
    order = permutation(60_000, 3)
    assert sorted(order.tolist()) == list(range(60_000))
    assert order[-5:].tolist() == permutation_end(60_000, 3, 5)


def permutation_end(n, seed, count):
    rng, moved, end = StdRng(seed), {}, []
    for i in range(n - 1, n - 1 - count, -1):
        j = int(rng.integers(1, i)[0])
        end.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return end[::-1]


def test_many_rows_are_ordered_in_no_time():
    start = time.perf_counter()
    order = permutation(200_000, 42)
    assert time.perf_counter() - start < 2
    assert len(np.unique(order)) == 200_000


def test_steps_take_the_epochs_laid_end_to_end(opened):
    factor, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    line = [r for e in range(8) for r in draws_one_by_one(5, 42 ^ (e * factor & mask))]
    assert line[:10] != line[10:20]
    for rows in (1, 2, 3, 5, 7, 13):
        for step in range(len(line) // rows):
            assert opened.indices(step, rows) == line[step * rows : (step + 1) * rows]


def test_known_steps_have_known_rows(opened):
    # from a few lines of ChaCha and Fisher-Yates written for this, without the package
    known = [[4, 2, 1], [0, 3, 2], [0, 1, 4], [3, 4, 2]]
    assert [opened.indices(step, 3) for step in range(4)] == known


def test_a_file_opened_anew_goes_on_as_the_old_one(path, opened):
    for first in (0, 1, 4, 1000):
        with PackedFile.open(path, SEQ_LEN, 42) as again:
            for step in range(first, first + 4):
                assert again.indices(step, 3) == opened.indices(step, 3)
                ours, theirs = (f.batch(f.indices(step, 3)) for f in (again, opened))
                assert torch.equal(ours.ids, theirs.ids)
                assert torch.equal(ours.targets()[1], theirs.targets()[1])


def test_steps_far_apart_and_back_have_the_same_rows(opened):
    steps = [0, 900, 1, 0, 7, 6, 900]
    once = {step: opened.indices(step, 4) for step in steps}
    assert all(opened.indices(step, 4) == once[step] for step in reversed(steps))


def test_orders_at_the_edge_of_an_epoch_are_made_once(opened, monkeypatch):
    made = []

    def counted(n, seed):
        made.append(seed)
        return permutation(n, seed)

    monkeypatch.setattr(packed_file, "permutation", counted)
    for _ in range(5):
        # as threads do that read ahead
        for step in (6, 4, 5):
            opened.indices(step, 1)
    assert len(made) == 2


def test_of_many_epochs_two_orders_are_kept(opened):
    for step in range(10):
        opened.indices(step, 5)
        assert len(opened._orders) <= 2


def test_another_seed_is_another_order(path):
    seen = set()
    for seed in range(20):
        with PackedFile.open(path, SEQ_LEN, seed) as file:
            seen.add(tuple(file.indices(0, 5)))
    assert len(seen) > 10


def test_a_batch_has_documents_as_segments(opened):
    batch = opened.batch([0, 3])
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [11, 12, 13, 14, 15, 16, 17, 18]]
    assert batch.lengths.tolist() == [5, 8]
    assert batch.segments.dtype == torch.int32
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2]]
    assert batch.positions().tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 0, 1, 2]]
    ids, predicts = batch.targets()
    assert predicts.tolist() == [[T, T, F, T, F, F, F, F], [T, F, F, T, F, T, F, F]]
    assert ids[predicts].tolist() == [6, 7, 9, 12, 15, 17]


def test_the_largest_id_survives(opened):
    batch = opened.batch([2])
    assert batch.ids.tolist() == [[LARGE, 0, LARGE, 0, 0, 0, 0, 0]]
    assert batch.lengths.tolist() == [3]
    # the first token of a document is predicted by nothing
    assert batch.targets()[1].tolist() == [[T, T] + [F] * 6]


def test_chunks_are_the_rows_in_order(opened):
    chunks = [opened.chunk(i, 2) for i in range(4)]
    assert [chunk.batch() for chunk in chunks[:3]] == [2, 2, 1]
    assert chunks[3] is None
    assert torch.cat([c.ids for c in chunks[:3]]).equal(opened.batch(range(5)).ids)


def test_a_span_is_a_file_of_its_own(path, opened):
    with PackedFile.open(path, SEQ_LEN, 42, span=(3, 5)) as span:
        assert span.rows() == 2
        assert torch.equal(span.batch([0, 1]).ids, opened.batch([3, 4]).ids)
        assert sorted(span.indices(0, 2)) == sorted(span.indices(1, 2)) == [0, 1]
        with pytest.raises(InvalidDataset, match=r"row 2 was asked of .*, which has 2 to read"):
            span.batch([2])


@pytest.mark.parametrize("span", [(0, 6), (2, 2), (-1, 3), (3, 1)])
def test_a_span_outside_the_file_is_refused(path, span):
    with pytest.raises(InvalidConfig, match=r"within the 5 rows of"):
        PackedFile.open(path, SEQ_LEN, 42, span)


@pytest.mark.parametrize(
    ("row", "word", "value", "reason"),
    [
        (0, 0, 5, "row 0 of .* does not begin with a document"),
        (0, 0, PADDING, "row 0 of .* does not begin with a document"),
        (3, 0, 1 << 31 | 11, "row 3 of .* does not begin with a document"),
        (3, 4, PADDING, "row 3 of .* has padding at token 4, before its end"),
        (0, 7, 9, "row 0 of .* has padding at token 5, before its end"),
    ],
)
def test_damaged_rows_are_refused_by_their_place(path, row, word, value, reason):
    words = np.fromfile(path, "<u4")
    words[row * SEQ_LEN + word] = value
    words.tofile(path)
    with pytest.raises(InvalidDataset, match=reason), PackedFile.open(path, SEQ_LEN, 1) as opened:
        opened.batch(range(5))


def test_a_file_of_another_seq_len_is_refused(path):
    with pytest.raises(InvalidDataset, match="not a multiple of the 24 of a row of seq_len 6"):
        PackedFile.open(path, 6, 42)
    with pytest.raises(InvalidDataset, match="or was made with another seq_len than 10"):
        PackedFile.open(path, 10, 42)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_that_was_cut_is_refused(path, size):
    os.truncate(path, size)
    with pytest.raises(InvalidDataset, match=f"has {size} bytes, not a multiple of the 32"):
        PackedFile.open(path, SEQ_LEN, 42)


def test_a_file_cut_while_it_is_open_is_refused(path, opened):
    os.truncate(path, 64)
    with pytest.raises(InvalidDataset, match="changed while it was being read"):
        opened.batch([0])


def test_bad_requests_are_refused(path, opened):
    for step, rows in ((-1, 2), (0, 0)):
        with pytest.raises(InvalidConfig, match="steps count from 0"):
            opened.indices(step, rows)
    for index, sequences in ((-1, 2), (0, 0)):
        with pytest.raises(InvalidConfig, match="chunks count from 0"):
            opened.chunk(index, sequences)
    with pytest.raises(InvalidConfig, match="needs at least one row"):
        opened.batch([])
    with pytest.raises(InvalidConfig, match="seq_len is 1"):
        PackedFile.open(path, 1, 42)
    with pytest.raises(InvalidConfig, match="seed is -1"):
        PackedFile.open(path, SEQ_LEN, -1)
    opened.close()
    with pytest.raises(Io, match="was closed"):
        opened.batch([0])
