"""Sequences of token ids as one padded rectangle that knows which positions are predicted.

The shift is made here and only here: row t of a sequence is scored against token t + 1. A mask
marks the tokens that are targets, as label masks do, so everything that follows (the loss, its
count, accumulation) sees rows and never sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastbrain.errors import EmptyDataset, InvalidConfig
from fastbrain.tokens.ids import Ids, check_range, integers

_INT64_END = 1 << 63

Rectangle: TypeAlias = npt.NDArray[Any] | Tensor


@dataclass(frozen=True)
class Layout:
    """The shape of a batch; `valid` (batch, seq_len) marks real tokens, None if all are."""

    batch: int
    seq_len: int
    valid: Tensor | None


class TokenBatch:
    """B sequences, padded on the right with id 0 to the longest, S.

    `sequences` are lists, numpy arrays or 1-D tensors of ids from 0 up to 2**63 - 1, or one 2-D
    array of them. Raises EmptyDataset without sequences, InvalidConfig for one of fewer than two
    tokens or for what is no id. Every token but the first of each sequence is a target.

    Attributes:
        ids: (B, S), int64, on the CPU.
        lengths: (B,), int64, the tokens of each sequence that are no padding.
        segments: (B, S), int32, the document of each position where sequences are packed of
            several, which do not see each other; else None.
    """

    def __init__(self, sequences: Sequence[Ids] | Rectangle) -> None:
        self.ids, self.lengths = _padded(sequences)
        self.segments: Tensor | None = None
        self._is_target: Tensor | None = None  # (B, S) bool; None: all that can be
        self._targets: tuple[Tensor, Tensor] | None = None

    @classmethod
    def new(cls, sequences: Sequence[Ids] | Rectangle) -> Self:
        """The same as the constructor."""
        return cls(sequences)

    @classmethod
    def supervised(cls, pairs: Iterable[tuple[Ids, Ids]]) -> Self:
        """Each (prompt, response) becomes one sequence, of which the response is the target.

        Nothing is added to it. A prompt may be empty; the first token of its response is then
        read but not predicted. Errors as for the constructor, then InvalidConfig for an empty
        response.
        """
        parts = [
            (_ids(prompt, f"prompt {i}"), _ids(response, f"response {i}"))
            for i, (prompt, response) in enumerate(pairs)
        ]
        whole = cls([np.concatenate(pair) for pair in parts])
        is_target = torch.zeros(whole.ids.shape, dtype=torch.bool)
        for i, (prompt, response) in enumerate(parts):
            if len(response) == 0:
                raise InvalidConfig(
                    f"the response of pair {i} is empty, so there is nothing to learn from it; "
                    "give it a response or leave the pair out"
                )
            is_target[i, len(prompt) : len(prompt) + len(response)] = True
        return whole.with_loss_mask(is_target)

    @classmethod
    def packed(cls, ids: Tensor, segments: Tensor, is_target: Tensor, lengths: Tensor) -> Self:
        """Sequences that each hold several documents, one after another.

        A document neither sees nor predicts another: its positions count from 0, and its first
        token is no target.

        Args:
            ids: (B, S) int64, 0 on padding.
            segments: (B, S) int32, non-decreasing along S, constant in each document; padding
                after the last document has a number of its own.
            is_target: (B, S) bool: the tokens to predict, as in `with_loss_mask`.
            lengths: (B) int64: tokens of each sequence that are no padding.

        Raises InvalidConfig for other shapes and types, fewer than two columns, ids below 0,
        lengths outside 1..S, and segments that decrease.
        """
        _check_packed(ids, segments, is_target, lengths)
        return cls._like(ids, lengths, is_target, segments)

    def with_loss_mask(self, flags: Sequence[bool] | Rectangle) -> Self:
        """The same batch with only these tokens as targets.

        `flags` are B*S booleans (or 0 and 1), row by row. The flag of a sequence's first token
        and of its padding count for nothing. Raises InvalidConfig for another number of them, and
        if nothing is left to predict.
        """
        found = flags.detach().cpu().numpy() if isinstance(flags, Tensor) else np.asarray(flags)
        if found.ndim == 2 and found.shape != tuple(self.ids.shape):
            raise InvalidConfig(
                f"the loss mask has shape {found.shape}; this batch needs "
                f"{tuple(self.ids.shape)}, or all flags in one row"
            )
        if found.size != self.rows():
            raise InvalidConfig(
                f"the loss mask has {found.size} flags; this batch of {self.batch()} sequences "
                f"padded to {self.seq_len()} needs {self.rows()}"
            )
        if not np.isin(found, (0, 1)).all():
            raise InvalidConfig("the flags of a loss mask must be booleans, or 0 and 1")
        is_target = torch.from_numpy(found.astype(bool).reshape(self.ids.shape))
        masked = self._like(self.ids, self.lengths, is_target, self.segments)
        if masked.predicted() == 0:
            raise InvalidConfig(
                "the loss mask leaves nothing to predict: no token but the first of a sequence, or "
                "padding, is marked"
            )
        return masked

    def slice(self, first: int, last: int) -> Self:
        """Sequences first to last - 1, as wide as the whole batch; may predict nothing.

        InvalidConfig unless 0 <= first < last <= B.
        """
        if not 0 <= first < last <= self.batch():
            raise InvalidConfig(
                f"slice({first}, {last}) is not within the {self.batch()} sequences of the batch"
            )
        mask = None if self._is_target is None else self._is_target[first:last]
        segments = None if self.segments is None else self.segments[first:last]
        return self._like(self.ids[first:last], self.lengths[first:last], mask, segments)

    def batch(self) -> int:
        """B, the number of sequences."""
        return self.ids.shape[0]

    def seq_len(self) -> int:
        """S, the length of the longest sequence."""
        return self.ids.shape[1]

    def rows(self) -> int:
        """B*S."""
        return self.ids.numel()

    def predicts(self, row: int) -> bool:
        """Whether row b*S + t predicts token t + 1 of sequence b; InvalidConfig outside B*S."""
        if not 0 <= row < self.rows():
            raise InvalidConfig(f"row is {row}; this batch has rows 0 to {self.rows() - 1}")
        return bool(self.targets()[1].view(-1)[row])

    def predicted(self) -> int:
        """How many rows predict."""
        return int(self.targets()[1].sum())

    def is_padded(self) -> bool:
        """Whether some sequence is shorter than S."""
        return bool((self.lengths < self.seq_len()).any())

    def layout(self) -> Layout:
        """Batch, length and, if there is padding, which tokens are real."""
        return Layout(self.batch(), self.seq_len(), self._real() if self.is_padded() else None)

    def valid_tokens(self) -> int:
        """How many tokens are no padding."""
        return int(self.lengths.sum())

    def positions(self) -> Tensor | None:
        """The place of each token in its document, (B, S) int32; None where that is its column."""
        if self.segments is None:
            return None
        columns = torch.arange(self.seq_len(), dtype=torch.int32).expand_as(self.segments)
        begins = torch.ones_like(self.segments, dtype=torch.bool)
        begins[:, 1:] = self.segments.diff(dim=1) != 0
        return columns - (columns * begins).cummax(dim=1).values

    def targets(self) -> tuple[Tensor, Tensor]:
        """The id that each row predicts, (B, S) int64, 0 where none; and whether it does, bool.

        Computed once; not to be written to.
        """
        if self._targets is None:
            mask = torch.zeros(self.ids.shape, dtype=torch.bool)
            mask[:, :-1] = self._real()[:, 1:]
            if self._is_target is not None:
                mask[:, :-1] &= self._is_target[:, 1:]
            if self.segments is not None:
                mask[:, :-1] &= self.segments[:, 1:] == self.segments[:, :-1]
            targets = torch.zeros_like(self.ids)
            targets[:, :-1] = self.ids[:, 1:]
            self._targets = targets.masked_fill_(~mask, 0), mask
        return self._targets

    def max_id(self) -> int:
        """The largest id in the batch."""
        return int(self.ids.max())

    def __repr__(self) -> str:
        return f"TokenBatch({self.batch()} x {self.seq_len()}, {self.predicted()} predicted)"

    def _real(self) -> Tensor:
        return torch.arange(self.seq_len()) < self.lengths[:, None]

    @classmethod
    def _like(
        cls, ids: Tensor, lengths: Tensor, is_target: Tensor | None, segments: Tensor | None
    ) -> Self:
        made = cls.__new__(cls)
        made.ids, made.lengths, made.segments = ids, lengths, segments
        made._is_target, made._targets = is_target, None
        return made


def _check_packed(ids: Tensor, segments: Tensor, is_target: Tensor, lengths: Tensor) -> None:
    same = ids.shape == segments.shape == is_target.shape and ids.shape[:1] == lengths.shape
    if ids.ndim != 2 or not same:
        raise InvalidConfig(
            f"ids, segments and is_target must have one shape, (B, S), and lengths (B,), got "
            f"{[tuple(t.shape) for t in (ids, segments, is_target, lengths)]}"
        )
    B, S = ids.shape
    if B < 1 or S < 2:
        raise InvalidConfig(
            f"ids has shape {(B, S)}; a batch needs a row, and a row 2 tokens to predict one"
        )
    for name, found in (("ids", ids), ("segments", segments), ("lengths", lengths)):
        if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise InvalidConfig(f"{name} is {found.dtype}; it must hold whole numbers")
    if is_target.dtype != torch.bool:
        raise InvalidConfig(f"is_target is {is_target.dtype}; it must be torch.bool")
    if int(ids.min()) < 0:
        raise InvalidConfig(f"ids holds {int(ids.min())}; ids count from 0, also on padding")
    for length in (int(lengths.min()), int(lengths.max())):
        if not 1 <= length <= S:
            raise InvalidConfig(f"lengths holds {length}; each must be from 1 to S, which is {S}")
    if bool((segments.diff(dim=1) < 0).any()):
        raise InvalidConfig("segments must not decrease along a sequence")


def _padded(sequences: Sequence[Ids] | Rectangle) -> tuple[Tensor, Tensor]:
    if isinstance(sequences, Tensor | np.ndarray) and sequences.ndim == 2 and len(sequences):
        B, S = sequences.shape
        flat = _ids(sequences.reshape(-1), "the batch")
        arrays = list(flat.reshape(B, S))
    else:
        arrays = [_ids(sequence, f"sequence {i}") for i, sequence in enumerate(sequences)]
    if not arrays:
        raise EmptyDataset("a batch needs at least one sequence")
    for i, array in enumerate(arrays):
        if len(array) < 2:
            raise InvalidConfig(
                f"sequence {i} has {len(array)} tokens; it needs at least 2, one to predict the "
                "other from"
            )
    lengths = [len(array) for array in arrays]
    ids = np.zeros((len(arrays), max(lengths)), np.int64)
    for row, array in zip(ids, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(ids), torch.tensor(lengths)


def _ids(ids: Ids, what: str) -> npt.NDArray[np.int64]:
    array = integers(ids, f"the ids of {what}", InvalidConfig)
    check_range(array, _INT64_END, f"the ids of {what}", InvalidConfig)
    return array.astype(np.int64, copy=False)
