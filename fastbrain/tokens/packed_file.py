"""Instruction data as a file of rows of equal length, each packed with whole documents.

A row is `seq_len` little-endian 32-bit words; the file has no header. Of a word the low 30 bits
are the id of a token, bit 30 says that it begins a document, bit 31 that it is to be predicted.
After its last document a row is filled up with words of 32 ones. Which rows a step reads is a
function of the seed and the step number, so there is no cursor to save.
"""

import operator
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.stdrng import StdRng
from fastbrain.tokens.token_batch import TokenBatch
from fastbrain.tokens.watched import WatchedFile

U32 = npt.NDArray[np.uint32]

PADDING = 0xFFFFFFFF
TARGET = 1 << 31
BEGIN = 1 << 30
ID_END = BEGIN - 1  # the largest id would be padding where it begins a document as a target
_WIDTH = 4  # bytes of a word
_DRAWS = 1 << 16  # numbers taken from the generator at once
_STEP_FACTOR = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


class PackedFile:
    """An open file of packed rows, or a span of one; `PackedFile.open` makes it.

    Rows count from the span's first. Several threads may read at once. If the file changes while
    it is open, the next read raises InvalidDataset.
    """

    def __init__(
        self, path: atomic.StrPath, seq_len: int, seed: int, span: tuple[int, int] | None
    ) -> None:
        # numpy's integers would overflow in what follows
        self._seed = operator.index(seed)
        StdRng(self._seed)  # refuses what is no seed
        self.seq_len = operator.index(seq_len)
        if self.seq_len < 2:
            raise InvalidConfig(f"seq_len is {seq_len}; a row needs 2 tokens to predict one")
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._lock = threading.Lock()
        self._file = WatchedFile(path)
        self.path = self._file.path
        try:
            self._first, self._rows = self._span(span)
            self._words(0)  # refuses a file of something else, or of another seq_len
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls, path: atomic.StrPath, seq_len: int, seed: int, span: tuple[int, int] | None = None
    ) -> Self:
        """Open the file at `path`, made with this `seq_len`; `seed`, in [0, 2**64), orders rows.

        `span` (first, last + 1) makes a file of its own of these rows. Raises Io for a file that
        cannot be read, InvalidDataset for one that cannot be packed rows, InvalidConfig for a bad
        span, seed or seq_len.
        """
        return cls(path, seq_len, seed, span)

    def rows(self) -> int:
        """How many rows the span has."""
        return self._rows

    def indices(self, step: int, rows: int) -> list[int]:
        """The rows of a step: elements step * rows and on of the epochs laid end to end.

        Epoch e is a permutation of all rows that the seed and e decide. Raises InvalidConfig for
        a negative step or fewer than one row.
        """
        step, rows = operator.index(step), operator.index(rows)
        if step < 0 or rows < 1:
            raise InvalidConfig(
                f"step is {step} and rows is {rows}; steps count from 0, and one needs a row"
            )
        found: list[int] = []
        at, end = step * rows, (step + 1) * rows
        while at < end:
            epoch, place = divmod(at, self._rows)
            part = self._order(epoch)[place : place + end - at]
            found += part.tolist()
            at += len(part)
        return found

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """These rows, one sequence of several documents each.

        Raises InvalidDataset for a row outside the span, and for a damaged one, naming its place.
        """
        if not len(indices):
            raise InvalidConfig("a batch needs at least one row")
        words = np.stack([self._words(operator.index(index)) for index in indices])
        real = words != PADDING
        begins = real & (words & BEGIN != 0)
        # padding after the last document becomes one more
        begins[:, 1:] |= real[:, :-1] & ~real[:, 1:]
        ids = np.where(real, words & (BEGIN - 1), 0).astype(np.int64)
        return TokenBatch.packed(
            torch.from_numpy(ids),
            torch.from_numpy(np.cumsum(begins, axis=1, dtype=np.int32) - 1),
            torch.from_numpy(real & (words & TARGET != 0)),
            torch.from_numpy(real.sum(axis=1, dtype=np.int64)),
        )

    def chunk(self, index: int, sequences: int) -> TokenBatch | None:
        """The index-th batch of consecutive rows, or None past the last one.

        The last batch may have fewer. Raises InvalidConfig for a negative index or no sequences.
        """
        if index < 0 or sequences < 1:
            raise InvalidConfig(
                f"index is {index} and sequences is {sequences}; chunks count from 0, and one "
                "needs a sequence"
            )
        first = index * sequences
        last = min(first + sequences, self._rows)
        return self.batch(range(first, last)) if first < last else None

    def close(self) -> None:
        """Close the file; reading from it afterwards is an Io error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        with self._lock:
            if epoch not in self._orders:
                # a step at the edge of an epoch reads from two
                self._orders = dict(list(self._orders.items())[-1:])
                self._orders[epoch] = permutation(
                    self._rows, self._seed ^ (epoch * _STEP_FACTOR & _MASK64)
                )
            return self._orders[epoch]

    def _words(self, index: int) -> U32:
        if not 0 <= index < self._rows:
            raise InvalidDataset(
                f"row {index} was asked of {self.path}, which has {self._rows} to read"
            )
        row = self._first + index
        data = self._file.read(row * self.seq_len * _WIDTH, self.seq_len * _WIDTH)
        words = np.frombuffer(data, "<u4").astype(np.uint32, copy=False)
        real = words != PADDING
        length = int(np.count_nonzero(real))
        if not real[0] or not words[0] & BEGIN:
            raise self._damaged(row, "does not begin with a document")
        if not real[:length].all():
            raise self._damaged(row, f"has padding at token {int(np.argmin(real))}, before its end")
        return words

    def _damaged(self, row: int, how: str) -> InvalidDataset:
        return InvalidDataset(
            f"row {row} of {self.path} {how}; it is no file of packed rows, is damaged, or was "
            f"made with another seq_len than {self.seq_len}: prepare it again"
        )

    def _span(self, span: tuple[int, int] | None) -> tuple[int, int]:
        """First row and number of rows."""
        row_bytes = self.seq_len * _WIDTH
        rows, rest = divmod(self._file.size, row_bytes)
        if rest or not rows:
            raise InvalidDataset(
                f"{self.path} has {self._file.size} bytes, not a multiple of the {row_bytes} of a "
                f"row of seq_len {self.seq_len}; it was cut short, or made with another seq_len"
            )
        first, end = map(operator.index, span if span is not None else (0, rows))
        if not 0 <= first < end <= rows:
            raise InvalidConfig(
                f"span is ({first}, {end}); it must be (first, last + 1) with 0 <= first <= last, "
                f"within the {rows} rows of {self.path}"
            )
        return first, end - first


def permutation(n: int, seed: int) -> npt.NDArray[np.int64]:
    """0 to n - 1 as Fisher-Yates from the top orders them: i from n - 1 to 1 is swapped with a
    draw from 0..=i of StdRng(seed)."""
    order = list(range(n))
    rng = StdRng(seed)
    draws = iter(rng.u64(min(2 * n, _DRAWS)).tolist())
    for i in range(n - 1, 0, -1):
        # what `StdRng.integers(1, i)` does, whose calls cost too much one by one
        span = i + 1
        zone = (span << (64 - span.bit_length())) - 1
        while True:
            draw = next(draws, None)
            if draw is None:
                draws = iter(rng.u64(_DRAWS).tolist())
                continue
            product = draw * span
            if product & _MASK64 <= zone:
                break
        j = product >> 64
        order[i], order[j] = order[j], order[i]
    return np.array(order, np.int64)


def row_words(documents: Sequence[U32], seq_len: int) -> U32:
    """A row of these documents, each words of ids and `TARGET` bits, at most seq_len in all."""
    row = np.full(seq_len, PADDING, np.uint32)
    at = 0
    for words in documents:
        row[at : at + len(words)] = words
        row[at] |= np.uint32(BEGIN)
        at += len(words)
    return row


def document_words(ids: Sequence[int] | npt.NDArray[Any], is_target: Sequence[bool]) -> U32:
    """A document for `row_words`; its ids must be below `ID_END`."""
    words: U32 = np.asarray(ids).astype(np.uint32)
    words |= np.asarray(is_target, np.uint32) << np.uint32(31)
    return words
