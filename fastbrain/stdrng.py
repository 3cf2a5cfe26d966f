"""The random numbers of Rust's `rand` 0.8 `StdRng`: a seed means here what it means to the crate.

It is ChaCha with 12 rounds read as one endless row of 32-bit words; every draw takes the next
words, whoever asks. Blocks depend only on their number, so numpy computes thousands at a time.
"""

import math

import numpy as np
import numpy.typing as npt

from fastbrain.errors import InvalidConfig

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

_WORDS = 16  # in a block
# Blocks computed at once: what is in flight, some 0.6 MB, stays in a core's second-level cache.
_CHUNK = 4096
# Blocks computed for a small draw: as many cost no more than one, the calls do.
_AHEAD = 64
_MASK64 = (1 << 64) - 1
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)


class StdRng:
    """One generator; `seed` is an integer in [0, 2**64), InvalidConfig otherwise."""

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise InvalidConfig(f"seed is {seed!r}; it must be a whole number")
        seed = int(seed)
        if not 0 <= seed <= _MASK64:
            raise InvalidConfig(f"seed is {seed}; it must be from 0 to 2**64 - 1")
        self._key = _key_words(int(seed))
        self._block = 0
        self._left = np.empty(0, np.uint32)

    def u32(self, n: int) -> U32:
        """The next `n` words."""
        out = np.empty(n, np.uint32)
        self._draw(out)
        return out

    def u64(self, n: int) -> U64:
        """The next `n` pairs of words, the first of each being the low half."""
        return self.u32(2 * n).astype("<u4", copy=False).view("<u8").astype(np.uint64, copy=False)

    def uniform(self, n: int, low: float, high: float) -> F32:
        """`n` numbers in [low, high), computed in float32; one word each, and one per redraw.

        Needs low < high, both finite in float32, InvalidConfig otherwise.
        """
        first, last = np.float32(low), np.float32(high)
        with np.errstate(over="ignore"):
            scale = last - first
        if not (first < last and np.isfinite(scale)):
            raise InvalidConfig(f"uniform needs low < high, finite in f32, but got [{low}, {high})")
        out = np.empty(n, np.float32)
        words = out.view(np.uint32)
        rounded_up = False
        for start in range(0, n, _CHUNK * _WORDS):
            part = slice(start, start + _CHUNK * _WORDS)
            word, x = words[part], out[part]
            self._draw(word)
            word >>= np.uint32(9)
            word |= np.uint32(0x3F800000)  # the float in [1, 2) with these 23 bits
            x -= np.float32(1)
            x *= scale
            x += first
            rounded_up |= bool(x.max() >= last)
        if rounded_up:
            # each word is judged on its own, so dropping these and drawing on at the end of the
            # row is what drawing them one after another does
            out = out[out < last]
            out = np.concatenate((out, self.uniform(n - len(out), low, high)))
        return out

    def integers(self, n: int, high: int) -> U64:
        """`n` integers, each equally likely among 0..=high; two words each, and two per redraw.

        `high` is in [0, 2**64), InvalidConfig otherwise.
        """
        if not 0 <= high <= _MASK64:
            raise InvalidConfig(f"high is {high}; it must be from 0 to 2**64 - 1")
        if high == _MASK64:
            return self.u64(n)
        span = int(high) + 1
        zone = ((span << (64 - span.bit_length())) - 1) & _MASK64
        upper, lower = _multiply(self.u64(n), span)
        kept = upper[lower <= np.uint64(zone)]
        if len(kept) < n:
            kept = np.concatenate((kept, self.integers(n - len(kept), high)))
        return kept

    def _draw(self, out: U32) -> None:
        done = 0
        while done < len(out):
            missing = len(out) - done
            if len(self._left) == 0 and missing >= _CHUNK * _WORDS:
                whole = out[done : done + _CHUNK * _WORDS]
                self._next_blocks(whole.reshape(_CHUNK, _WORDS))
                done += len(whole)
                continue
            if len(self._left) == 0:
                blocks = np.empty((max(_AHEAD, math.ceil(missing / _WORDS)), _WORDS), np.uint32)
                self._next_blocks(blocks)
                self._left = blocks.reshape(-1)
            taken = self._left[:missing]
            out[done : done + len(taken)] = taken
            self._left = self._left[len(taken) :]
            done += len(taken)

    def _next_blocks(self, out: U32) -> None:
        """Write the next blocks, one to a row of `out`, (N, 16)."""
        n = len(out)
        counter = np.arange(self._block, self._block + n, dtype=np.uint64)
        self._block += n
        # row i of a, b, c, d holds words i, 4 + i, 8 + i, 12 + i of every block
        start = np.zeros((4, 4, n), np.uint32)
        start[0] = _CONSTANTS[:, None]
        start[1:3] = self._key.reshape(2, 4, 1)
        start[3, 0] = counter & np.uint64(0xFFFFFFFF)
        start[3, 1] = counter >> np.uint64(32)
        a, b, c, d = start.copy()
        spare, other = np.empty_like(a), np.empty_like(a)
        for half_round in range(12):
            for left_d, left_b in ((16, 12), (8, 7)):
                a += b
                d ^= a
                _rotate(d, left_d, spare)
                c += d
                b ^= c
                _rotate(b, left_b, spare)
            # columns become diagonals, and after the next round columns again
            by = 1 if half_round % 2 == 0 else 3
            b, other = _rolled(b, by, other), b
            c, other = _rolled(c, 2, other), c
            d, other = _rolled(d, 4 - by, other), d
        for row, x in enumerate((a, b, c, d)):
            x += start[row]
            out[:, 4 * row : 4 * row + 4] = x.T


def _key_words(seed: int) -> U32:
    """The eight words that `seed_from_u64` makes of a seed."""
    words, state = [], seed
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) & _MASK64
        x = (((state >> 18) ^ state) >> 27) & 0xFFFFFFFF
        turn = state >> 59
        words.append((x >> turn | x << (32 - turn)) & 0xFFFFFFFF)
    return np.array(words, np.uint32)


def _rotate(x: U32, left: int, spare: U32) -> None:
    np.left_shift(x, np.uint32(left), out=spare)
    x >>= np.uint32(32 - left)
    x |= spare


def _rolled(x: U32, by: int, out: U32) -> U32:
    out[: 4 - by] = x[by:]
    out[4 - by :] = x[:by]
    return out


def _multiply(x: U64, factor: int) -> tuple[U64, U64]:
    """High and low 64 bits of x * factor, by way of 32-bit halves."""
    half, low32 = np.uint64(32), np.uint64(0xFFFFFFFF)
    f1, f0 = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    x1, x0 = x >> half, x & low32
    low = x0 * f0
    middle = x1 * f0 + (low >> half)  # at most 2**64 - 2**32: no carry is lost
    cross = x0 * f1 + (middle & low32)
    high = x1 * f1 + (middle >> half) + (cross >> half)
    return high, (cross << half) | (low & low32)
