"""A corpus as a flat file of 32-bit token ids, larger than memory, read by position.

Which tokens a step reads is a function of the seed and the step number, so a run that dies and
resumes reads what it would have read, and there is no cursor to save.
"""

import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastbrain import atomic
from fastbrain.errors import InvalidConfig, InvalidDataset
from fastbrain.stdrng import StdRng
from fastbrain.tokens import jsonl
from fastbrain.tokens.ids import U32_END, Ids, check_range, integers
from fastbrain.tokens.sniff import impostor
from fastbrain.tokens.token_batch import TokenBatch
from fastbrain.tokens.watched import WatchedFile

_WIDTH = 4  # bytes of one id
_SCAN = 1 << 20  # ids read or written at once by what goes over a whole file
_STEP_FACTOR = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


class TokenFile:
    """An open token file, or a span of one; `TokenFile.open` makes it.

    Positions and counts are in tokens and begin at the span. Several threads may read at once.
    If the file is cut short, grown, rewritten or replaced while it is open, the next read raises
    InvalidDataset and names the byte that it wanted.
    """

    write_jsonl = staticmethod(jsonl.write_jsonl)

    def __init__(self, path: atomic.StrPath, seed: int, span: tuple[int, int] | None) -> None:
        # numpy's integers would overflow in what follows
        self._seed = operator.index(seed)
        StdRng(self._seed)  # refuses what is no seed
        self._file = WatchedFile(path)
        self.path = self._file.path
        try:
            _check_content(self._file)
            self._first, self._tokens = _span(self._file, span)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: atomic.StrPath, seed: int, span: tuple[int, int] | None = None) -> Self:
        """Open the token file at `path`, whose windows `seed`, in [0, 2**64), will order.

        `span` (first, last + 1) makes a file of its own of these tokens. Raises Io for a file
        that cannot be read, InvalidDataset for one that cannot be token ids (empty, not a
        multiple of four bytes, or recognized as something else), InvalidConfig for a bad span.
        """
        return cls(path, seed, span)

    @staticmethod
    def write(path: atomic.StrPath, ids: Ids) -> None:
        """Write `ids`, integers in [0, 2**32), in place of the file at `path`, durably.

        InvalidDataset for ids that are none, Io for a file that cannot be written; either leaves
        the old file. No ids at all make an empty file, which `open` refuses.
        """
        array = integers(ids, "token ids", InvalidDataset)
        with atomic.replacing(path) as file:
            for start in range(0, len(array), _SCAN):
                part = array[start : start + _SCAN]
                check_range(part, U32_END, "token ids", InvalidDataset, start)
                file.write(part.astype("<u4").data)

    def tokens(self) -> int:
        """How many tokens the span has."""
        return self._tokens

    def offsets(self, step: int, sequences: int, seq_len: int) -> npt.NDArray[np.int64]:
        """Where the windows of `batch(step, sequences, seq_len)` begin, in order; same errors."""
        _check_shape(sequences, seq_len)
        step = operator.index(step)
        if not 0 <= step <= _MASK64:
            raise InvalidConfig(f"step is {step}; it must be from 0 to 2**64 - 1")
        if seq_len > self._tokens:
            raise InvalidDataset(
                f"{self.path} has {self._tokens} tokens to read, fewer than one window of seq_len "
                f"{seq_len}; use a shorter seq_len or a larger file"
            )
        rng = StdRng(self._seed ^ (step * _STEP_FACTOR & _MASK64))
        return rng.integers(sequences, self._tokens - seq_len).astype(np.int64)

    def batch(self, step: int, sequences: int, seq_len: int) -> TokenBatch:
        """`sequences` windows of `seq_len` tokens, at uniform offsets that seed and step decide.

        Raises InvalidConfig for seq_len below 2, no sequences, or a step outside [0, 2**64), and
        InvalidDataset if the span is shorter than a window.
        """
        return self.windows(self.offsets(step, sequences, seq_len), seq_len)

    def chunk(self, index: int, sequences: int, seq_len: int) -> TokenBatch | None:
        """The index-th batch of consecutive windows, or None past the last whole one.

        The last batch may have fewer sequences; tokens that fill no window are dropped. Raises
        InvalidConfig as `batch` does, and for a negative index.
        """
        _check_shape(sequences, seq_len)
        if index < 0:
            raise InvalidConfig(f"index is {index}; chunks count from 0")
        start = index * sequences * seq_len
        windows = min(sequences, (self._tokens - start) // seq_len)
        if windows <= 0:
            return None
        return self.windows(range(start, start + windows * seq_len, seq_len), seq_len)

    def windows(self, offsets: Sequence[int] | npt.NDArray[Any], seq_len: int) -> TokenBatch:
        """The windows of `seq_len` tokens at these offsets, one sequence each."""
        rows = np.empty((len(offsets), seq_len), np.int64)
        for row, offset in zip(rows, offsets, strict=True):
            row[:] = self._ids(int(offset), seq_len)
        return TokenBatch(rows)

    def read(self, offset: int, count: int) -> npt.NDArray[np.uint32]:
        """The `count` ids from `offset` on; InvalidDataset where they reach outside the span."""
        return self._ids(offset, count).astype(np.uint32)

    def max_id(self) -> int:
        """The largest id of the span; reads all of it, a piece at a time."""
        starts = range(0, self._tokens, _SCAN)
        return max(int(self._ids(s, min(_SCAN, self._tokens - s)).max()) for s in starts)

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

    def _ids(self, offset: int, count: int) -> npt.NDArray[np.uint32]:
        if not 0 <= offset <= offset + count <= self._tokens:
            raise InvalidDataset(
                f"tokens {offset} to {offset + count} were asked of {self.path}, which has "
                f"{self._tokens} to read"
            )
        data = self._file.read((self._first + offset) * _WIDTH, count * _WIDTH)
        return np.frombuffer(data, "<u4")


def _check_content(file: WatchedFile) -> None:
    if file.size == 0:
        raise InvalidDataset(
            f"{file.path} is empty; write token ids to it with TokenFile.write or write_jsonl"
        )
    if file.size < _WIDTH:
        raise InvalidDataset(
            f"{file.path} has {file.size} of the {_WIDTH} bytes of one token id; it was cut short, "
            "or is no token file"
        )
    found = impostor(file.sample)
    if found:
        raise InvalidDataset(f"{file.path} looks like {found[0]}, not like 32-bit ids; {found[1]}")
    if file.size % _WIDTH:
        raise InvalidDataset(
            f"{file.path} has {file.size} bytes, not a multiple of the {_WIDTH} bytes of an id; "
            "it was cut short, or is no token file"
        )


def _span(file: WatchedFile, span: tuple[int, int] | None) -> tuple[int, int]:
    """First token and number of tokens."""
    tokens = file.size // _WIDTH
    first, end = map(operator.index, span if span is not None else (0, tokens))
    if not 0 <= first < end <= tokens:
        raise InvalidConfig(
            f"span is ({first}, {end}); it must be (first, last + 1) with 0 <= first <= last, "
            f"within the {tokens} tokens of {file.path}"
        )
    return first, end - first


def _check_shape(sequences: int, seq_len: int) -> None:
    if seq_len < 2:
        raise InvalidConfig(f"seq_len is {seq_len}; a window needs 2 tokens to predict one")
    if sequences < 1:
        raise InvalidConfig(f"sequences is {sequences}; a batch needs at least one")
