"""The generator against published vectors, the crate's own draws, and a scalar version of it."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from fastbrain.errors import InvalidConfig
from fastbrain.stdrng import StdRng

TABLES = Path(__file__).parent / "fixtures" / "tables"
MASK64 = (1 << 64) - 1


def scalar_block(key, counter):
    """One block of ChaCha with 12 rounds, a word at a time."""

    def turn(a, b, c, d):
        for left_d, left_b in ((16, 12), (8, 7)):
            x[a] = (x[a] + x[b]) & 0xFFFFFFFF
            x[d] ^= x[a]
            x[d] = (x[d] << left_d | x[d] >> (32 - left_d)) & 0xFFFFFFFF
            x[c] = (x[c] + x[d]) & 0xFFFFFFFF
            x[b] ^= x[c]
            x[b] = (x[b] << left_b | x[b] >> (32 - left_b)) & 0xFFFFFFFF

    constants = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    start = [*constants, *key, counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    x = list(start)
    for _ in range(6):
        for i in range(4):
            turn(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            turn(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True)]


def with_key(*words):
    rng = StdRng(0)
    rng._key = np.array(words, np.uint32)
    return rng


def test_the_vector_that_rand_publishes_for_its_key():
    assert with_key(1, 23, 456, 7890, 0, 0, 0, 0).u64(1).tolist() == [10719222850664546238]


def test_seeds_give_the_words_of_the_crate():
    assert StdRng(42).u32(4).tolist() == [572990626, 2261546851, 1068323197, 2330987027]
    assert StdRng(7).u64(3).tolist() == [
        559256596868823998,
        5664742077951270790,
        2631283358781127885,
    ]


@pytest.mark.parametrize(
    ("bound", "values"),
    [
        (0.02, [-0.014663611, 0.0010622926, -0.010050468, 0.0017090086]),
        (0.0625, [-0.045823783, 0.0033196658, -0.031407714, 0.0053406507]),
    ],
)
def test_uniform_gives_the_floats_of_the_crate_to_the_bit(bound, values):
    drawn = StdRng(42).uniform(4, -bound, bound)
    assert drawn.dtype == np.float32
    assert drawn.tolist() == np.array(values, np.float32).tolist()


def test_blocks_are_those_of_the_scalar_version_whatever_their_number():
    for first in (0, 2**32 - 3, 2**40 + 5):
        rng = StdRng(99)
        rng._block = first
        key = rng._key.tolist()
        expected = [word for i in range(8) for word in scalar_block(key, first + i)]
        assert rng.u32(8 * 16).tolist() == expected


def test_draws_split_in_odd_ways_are_one_row():
    whole = StdRng(5).u32(300_000)
    rng, parts = StdRng(5), []
    for count in (1, 0, 15, 16, 17, 63, 64, 65, 1023, 1025, 70_000, 3, 65_536, 131_072):
        parts.append(rng.u32(count))
    drawn = np.concatenate(parts)
    assert np.array_equal(drawn, whole[: len(drawn)])


def test_all_kinds_of_draw_share_one_position():
    words = StdRng(5).u32(10)
    rng = StdRng(5)
    assert rng.u32(1)[0] == words[0]
    # an odd word is the low half of the next pair
    assert rng.u64(1)[0] == int(words[1]) | int(words[2]) << 32
    one = (words[3] >> 9 | np.uint32(0x3F800000)).view(np.float32)
    assert rng.uniform(1, 0, 1)[0] == one - np.float32(1)
    pair = int(words[4]) | int(words[5]) << 32
    assert rng.integers(1, MASK64)[0] == pair
    assert rng.u32(4).tolist() == words[6:].tolist()


def scalar_uniform(words, low, high):
    """What each word becomes, None where it is drawn again."""
    low, high = np.float32(low), np.float32(high)
    ones = (words >> np.uint32(9) | np.uint32(0x3F800000)).view(np.float32)
    return [float(x) if x < high else None for x in (ones - np.float32(1)) * (high - low) + low]


def test_a_float_rounded_up_to_the_bound_is_drawn_again():
    low, high = 1.0, 1 + 2**-22  # two steps of f32: a quarter of the draws round up
    words = StdRng(3).u32(4000)
    drawn = scalar_uniform(words, low, high)
    assert 800 < drawn.count(None) < 1200
    used = [i for i, x in enumerate(drawn) if x is not None][:2000]
    rng = StdRng(3)
    assert rng.uniform(2000, low, high).tolist() == [drawn[i] for i in used]
    assert rng.u32(1)[0] == words[used[-1] + 1]  # and not a word more


def accepted(words, high):
    """The integers in 0..=high that these draws give, None for each that is rejected."""
    span = high + 1
    zone = ((span << (64 - span.bit_length())) - 1) & MASK64
    return [x * span >> 64 if x * span & MASK64 <= zone else None for x in words]


@pytest.mark.parametrize("high", [0, 1, 2, 9, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 2])
def test_integers_are_those_of_the_scalar_rule_and_use_no_draw_too_many(high):
    words = StdRng(11).u64(4000).tolist()
    drawn = accepted(words, high)
    used = [i for i, x in enumerate(drawn) if x is not None][:1000]
    rng = StdRng(11)
    assert rng.integers(1000, high).tolist() == [drawn[i] for i in used]
    assert rng.u64(1)[0] == words[used[-1] + 1]


def test_rejection_is_put_to_the_test():
    words = StdRng(11).u64(1000).tolist()
    assert 300 < accepted(words, 2**63).count(None) < 700


def test_all_64_bits_are_the_draws_themselves():
    assert np.array_equal(StdRng(11).integers(100, MASK64), StdRng(11).u64(100))


def test_windows_are_those_of_the_crate():
    # computed with RustingBrain by Vasyl Trefilov
    table = json.loads((TABLES / "windows.json").read_text())
    assert len(table["rows"]) == 1458
    for tokens, seed, step, sequences, seq_len, offsets in table["rows"]:
        rng = StdRng(int(seed) ^ (int(step) * 0x9E3779B97F4A7C15 & MASK64))
        assert rng.integers(sequences, tokens - seq_len).tolist() == offsets


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(InvalidConfig, match=r"seed is .*from 0 to 2\*\*64 - 1"):
        StdRng(seed)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 1), (2, 1), (0, float("nan")), (0, float("inf")), (-3e38, 3e38)]
)
def test_ranges_without_numbers_are_refused(low, high):
    with pytest.raises(InvalidConfig, match="low < high"):
        StdRng(0).uniform(1, low, high)


@pytest.mark.parametrize("high", [-1, 2**64])
def test_bounds_beyond_64_bits_are_refused(high):
    with pytest.raises(InvalidConfig, match="high is"):
        StdRng(0).integers(1, high)


@pytest.mark.slow
def test_twenty_million_floats_a_second():
    count, best = 4_000_000, float("inf")
    for _ in range(10):
        start = time.perf_counter()
        StdRng(1).uniform(count, -0.02, 0.02)
        best = min(best, time.perf_counter() - start)
    assert count / best >= 20e6
