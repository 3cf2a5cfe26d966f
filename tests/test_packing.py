"""Documents to rows: nothing overflows, nothing is lost, and little is left empty."""

import math
import random
import time

import pytest

from fastbrain.errors import InvalidConfig
from fastbrain.tokens.packing import best_fit


def lengths(seed, count, capacity):
    drawn = random.Random(seed)
    kinds = [
        lambda: drawn.randint(1, capacity),
        lambda: min(capacity, 1 + int(drawn.expovariate(8 / capacity))),
        lambda: drawn.choice([1, capacity // 3 + 1, capacity // 2, capacity]) or 1,
    ]
    return [kinds[seed % 3]() for _ in range(count)]


def fewest_rows(lengths, capacity):
    """No packing has fewer: by their sum, and since two that are over half never share."""
    over_half = [n for n in lengths if 2 * n > capacity]
    return max(math.ceil(sum(lengths) / capacity), len(over_half))


def slow_best_fit(lengths, capacity):
    rows = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [capacity - sum(lengths[j] for j in row) - lengths[i] for row in rows]
        fitting = [(left, at) for at, left in enumerate(room) if left >= 0]
        if fitting:
            rows[min(fitting)[1]].append(i)
        else:
            rows.append([i])
    return sorted(sorted(row) for row in rows)


@pytest.mark.parametrize("seed", range(30))
def test_rows_hold_every_document_once_and_are_as_few_as_best_fit_makes_them(seed):
    capacity = (7, 64, 100)[seed // 10]
    some = lengths(seed, 40 + seed, capacity)
    rows = best_fit(some, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(some)))
    assert all(0 < sum(some[i] for i in row) <= capacity for row in rows)
    assert len(rows) <= 11 / 9 * fewest_rows(some, capacity) + 1
    assert rows == slow_best_fit(some, capacity)


def test_the_best_fit_is_taken_and_not_the_first():
    # first fit puts the 3 beside the 6 and then the 4 finds no room
    assert best_fit([6, 7, 3, 4], 10) == [[0, 3], [1, 2]]


def test_rows_are_in_the_order_of_their_documents():
    # so that the last rows are like the others
    rows = best_fit([1, 9, 5, 5, 10], 10)
    assert rows == [[0, 1], [2, 3], [4]]


def test_no_documents_need_no_rows():
    assert best_fit([], 5) == []


@pytest.mark.parametrize("bad", [0, 6, -1])
def test_a_document_that_fits_no_row_is_refused(bad):
    with pytest.raises(
        InvalidConfig, match=f"document 1 has {bad} tokens; a row takes from 1 to 5"
    ):
        best_fit([5, bad], 5)


def test_a_hundred_thousand_documents_take_seconds():
    some = lengths(0, 100_000, 2048)
    start = time.perf_counter()
    rows = best_fit(some, 2048)
    assert time.perf_counter() - start < 5
    assert len(rows) < 1.03 * fewest_rows(some, 2048)
